// The table of a comparison: mean, spread, and the paired difference to the first run.

import { fill, h } from "./dom.js";
import { fixed, p, signed, STATES } from "./words.js";

export function drawTable(element, runs, table) {
  const content = JSON.stringify([table, runs.map((run) => [run.row.state, run.label])]);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  const first = runs[0];
  const { decimals, unit, label } = first.row;
  const body = runs.map((run, i) => {
    const row = table.rows.find((one) => one.id === run.row.id);
    if (!row) return null;
    const spread = row.sd === null || row.sd === undefined ? "" : ` ± ${fixed(row.sd, decimals)}`;
    const interval = row.low === null || row.low === undefined ? "" : ` (${signed(row.low, decimals)} to ${signed(row.high, decimals)})`;
    const clear = row.holm !== null && row.holm < 0.05;
    return h("tr", {},
      h("th", { scope: "row" }, h("i", { class: "swatch", style: `background:${run.colour}` }), run.label,
        run.row.state === "finished" ? "" : h("span", { class: `state ${run.row.state}` }, STATES[run.row.state].word)),
      row.why
        ? h("td", { colspan: 4, class: "why" }, `not comparable: ${row.why}`)
        : [
          h("td", { class: "number" }, row.n ? (row.mean === null ? "no value" : `${fixed(row.mean, decimals)}${spread}`) : "no test yet"),
          h("td", { class: "number" }, row.n || ""),
          h("td", { class: "number" + (clear ? (row.gain > 0 ? " better" : " worse") : "") }, i === 0 ? "baseline" : typeof row.gain === "number" ? signed(row.gain, decimals) + interval : ""),
          h("td", { class: "number" }, p(row.holm)),
        ]);
  });
  const seeds = table.seeds.length;
  const common = table.round === null ? "There is no round yet that all have." : `After round ${table.round}, the last that all have.`;
  const at = table.live ? common : "After the last test. Runs that have not ended are not compared.";
  const test = table.higher === null ? "Whether high or low values are better is not known: there are no gains." : seeds < 2 ? "One seed: no spread, hence no test."
    : `Gains are paired by seed (n = ${seeds}) on the same partitions; positive is better. p by Student's t, Holm's correction.`;
  fill(element, h("div", { class: "scroll" }, h("table", { class: "compare" },
    h("thead", {}, h("tr", {}, ["Run", `${label} ${unit}`.trim(), "n", "Gain (95 %)", "p"].map((text, i) => h("th", { scope: "col", class: i ? "number" : "" }, text)))),
    h("tbody", {}, body))), h("p", { class: "small" }, `${at} ${test}`));
}

export function drawSettings(element, runs, settings) {
  const content = JSON.stringify([settings, runs.map((run) => run.label)]);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  if (!settings.length) { fill(element, h("p", { class: "small" }, "All settings are the same.")); return; }
  fill(element, h("h3", {}, "Where they differ"), h("div", { class: "scroll" }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), runs.map((run) => h("th", { scope: "col" }, h("i", { class: "swatch", style: `background:${run.colour}` }), run.label)))),
    h("tbody", {}, settings.map((one) => h("tr", {}, h("th", { scope: "row" }, one.key), one.values.map((value) => h("td", {}, value))))))));
}
