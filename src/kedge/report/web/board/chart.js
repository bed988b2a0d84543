// The chart: one line per run, its seeds behind it, values on hover.

import { fill, h } from "./dom.js";
import { have, mean } from "./curves.js";

export const COLOURS = ["#2f7fb5", "#e0812c", "#3f9b52", "#c8463f", "#8a63b8", "#8c6450", "#d16ba5", "#6f7b80", "#a3a02b", "#2fa7b0"];
const TITLES = { round: "round", mb: "MB sent and received", seconds: "seconds of computing" };
const MAX_POINTS = 800; // of one line; more are not seen

export const colour = (i) => COLOURS[i % COLOURS.length];

function thinned(points) {
  if (points.length <= MAX_POINTS) return points;
  const step = (points.length - 1) / (MAX_POINTS - 1);
  return Array.from({ length: MAX_POINTS }, (_, i) => points[Math.round(i * step)]);
}

export function rowsOf(seed) {
  return seed.round.map((round, i) => ({ round, mb: seed.mb[i], seconds: seed.seconds[i], value: seed.value[i] }));
}

// runs: [{row, colour, hidden}]; options: {column, x, log, seeds}
export function draw(element, runs, options) {
  const { column, x, log } = options;
  const means = [], single = [];
  for (const run of runs) {
    if (run.hidden) continue;
    const seeds = have(run.row.id, column);
    const label = run.label;
    for (const point of thinned(mean(seeds))) means.push({ ...point, run, label });
    if (options.seeds && seeds.filter((seed) => seed.round.length).length > 1) {
      for (const seed of seeds) for (const point of thinned(rowsOf(seed))) single.push({ ...point, run, z: `${run.row.id} ${seed.seed}` });
    }
  }
  if (!means.length) {
    const text = runs.some((run) => !run.hidden) ? `no ${column || "test"} yet` : "all curves are switched off";
    fill(element, h("p", { class: "none" }, text));
    return;
  }
  const decimals = runs[0].row.column === column ? runs[0].row.decimals : 4;
  const unit = runs[0].row.column === column && runs[0].row.unit ? ` (${runs[0].row.unit})` : "";
  const shown = (d) => {
    const spread = d.sd === null ? "" : ` ± ${d.sd.toFixed(decimals)} (n = ${d.n})`;
    const lines = [d.label, `${column} ${d.value.toFixed(decimals)}${spread}`, `round ${d.round}`];
    if (x === "mb") lines.push(`${d.mb.toPrecision(4)} MB`);
    if (x === "seconds") lines.push(`${d.seconds.toPrecision(4)} s`);
    return lines.join("\n");
  };
  const positive = !log || [...means, ...single].every((d) => d.value > 0);
  const lone = means.length <= 60;
  const plot = Plot.plot({
    width: Math.max(260, element.clientWidth), height: element.clientWidth < 480 ? 240 : 320,
    marginLeft: 52, marginBottom: 38, marginTop: 26, marginRight: 14,
    x: { label: TITLES[x], nice: false, tickFormat: x === "round" ? (d) => (Number.isInteger(d) ? String(d) : "") : undefined },
    y: { label: column + unit, grid: true, nice: true, type: log && positive ? "log" : "linear" },
    marks: [
      Plot.line(single, { x, y: "value", z: "z", stroke: (d) => d.run.colour, strokeOpacity: 0.3, strokeWidth: 1 }),
      Plot.line(means, { x, y: "value", z: (d) => d.run.row.id, stroke: (d) => d.run.colour, strokeWidth: 2 }),
      lone ? Plot.dot(means, { x, y: "value", fill: (d) => d.run.colour, r: 2 }) : null,
      Plot.ruleX(means, Plot.pointerX({ x, stroke: "currentColor", strokeOpacity: 0.25 })),
      Plot.dot(means, Plot.pointer({ x, y: "value", maxRadius: 160, fill: (d) => d.run.colour, r: 4 })),
      Plot.tip(means, Plot.pointer({ x, y: "value", maxRadius: 160, title: shown, stroke: (d) => d.run.colour })),
    ],
  });
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${column} over ${TITLES[x]} of ${runs.length === 1 ? "one run" : runs.length + " runs"}`);
  element.replaceChildren(plot);
}
