// The table of a comparison: mean, spread, and the paired difference to the first run.

import { p, STATES } from "./words.js";

export function drawTable(element, runs, table) {
  const content = JSON.stringify([table, runs.map((run) => [run.row.state, run.name])]);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  const first = runs[0];
  const { decimals, unit, label } = first.row;
  const body = runs.map((run, i) => {
    const row = table.rows.find((one) => one.id === run.row.id);
    if (!row) return null;
    const interval = finite(row.low) ? ` (${signed(row.low, decimals)} to ${signed(row.high, decimals)})` : "";
    const clear = row.holm !== null && row.holm < 0.05;
    return el("tr", {},
      el("th", { scope: "row" }, swatch(run), run.name,
        run.row.state === "finished" ? "" : el("span", { class: `state ${run.row.state}` }, STATES[run.row.state].word)),
      row.why
        ? el("td", { colspan: 4, class: "why" }, `not comparable: ${row.why}`)
        : [
          el("td", { class: "number" }, row.n ? (row.mean === null ? "no value" : spread(row.mean, row.sd, decimals)) : "no test yet"),
          el("td", { class: "number" }, row.n || ""),
          el("td", { class: "number" + (clear ? (row.gain > 0 ? " gain" : " loss") : "") }, i === 0 ? "baseline" : finite(row.gain) ? signed(row.gain, decimals) + interval : ""),
          el("td", { class: "number" }, p(row.holm)),
        ]);
  });
  const seeds = table.seeds.length;
  const common = table.round === null ? "There is no round yet that all have." : `After round ${table.round}, the last that all have.`;
  const at = table.live ? common : "After the last test. Runs that have not ended are not compared.";
  const test = table.higher === null ? "Whether high or low values are better is not known: there are no gains." : seeds < 2 ? "One seed: no spread, hence no test."
    : `Gains are paired by seed (n = ${seeds}) on the same partitions; positive is better. p by Student's t, Holm's correction.`;
  fill(element, el("div", { class: "scroll" }, el("table", { class: "compare" },
    el("thead", {}, el("tr", {}, ["Run", `${label} ${unit}`.trim(), "n", "Gain (95 %)", "p"].map((text, i) => el("th", { scope: "col", class: i ? "number" : "" }, text)))),
    el("tbody", {}, body))), el("p", { class: "small" }, `${at} ${test}`));
}

export function drawSettings(element, runs, settings) {
  const content = JSON.stringify([settings, runs.map((run) => run.name)]);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  if (!settings.length) { fill(element, el("p", { class: "small" }, "All settings are the same.")); return; }
  fill(element, el("h3", {}, "Where they differ"), el("div", { class: "scroll" }, el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), runs.map((run) => el("th", { scope: "col" }, swatch(run), run.name)))),
    el("tbody", {}, settings.map((one) => el("tr", {}, el("th", { scope: "row" }, one.key), one.values.map((value) => el("td", {}, value))))))));
}
