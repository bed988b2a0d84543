// Curves: points that the page has are kept, the server sends what is new.

import { ask } from "./store.js";

const kept = new Map(); // "id column" -> {epoch, seeds}
const AXIS = { round: "round", mb: "mb", s: "seconds" };
const FIELDS = ["round", "mb", "seconds", "value"];

export async function load(id, column) {
  const name = `${id} ${column}`;
  const old = kept.get(name);
  const query = new URLSearchParams({ column });
  if (old) {
    query.set("epoch", old.epoch);
    query.set("after", old.seeds.map((seed) => seed.value.length).join(","));
  }
  const found = await ask(`/run/${id}/curves?${query}`);
  const seeds = found.seeds.map((fresh, i) => {
    const before = found.epoch === old?.epoch ? old.seeds[i] : null;
    const points = { seed: fresh.seed };
    for (const field of FIELDS) points[field] = before ? before[field].slice(0, fresh.start).concat(fresh[field]) : fresh[field];
    return points;
  });
  kept.set(name, { epoch: found.epoch, seeds });
  return seeds;
}

const have = (id, column) => kept.get(`${id} ${column}`)?.seeds || [];

// A series of points over rounds, megabytes or seconds, for each seed that has begun.
export function seriesOf(id, column, axis) {
  const begun = have(id, column).filter((one) => one.round.length);
  return begun.map((one) => ({ seed: one.seed, points: one.round.map((round, i) => [round, one[AXIS[axis]][i], one.value[i]]) }));
}

const MAX_POINTS = 800; // of one line; more are not seen

function thinned(points) {
  if (points.length <= MAX_POINTS) return points;
  const step = (points.length - 1) / (MAX_POINTS - 1);
  return Array.from({ length: MAX_POINTS }, (_, i) => points[Math.round(i * step)]);
}

// The chart: one line per run, its seeds behind it, values on hover. `runs` are {row, name, colour, dash, hidden}.
export function draw(element, runs, { column, x, log, seeds }) {
  const lines = runs.filter((run) => !run.hidden).map((run) => {
    const series = seriesOf(run.row.id, column, x);
    return { run, rows: thinned(means(series, true)), series: series.map((one) => ({ ...one, points: thinned(one.points) })) };
  }).filter((line) => line.rows.length);
  if (!lines.length) {
    const text = runs.some((run) => !run.hidden) ? `no ${column || "test"} yet` : "all curves are switched off";
    fill(element, el("p", { class: "none" }, text));
    return;
  }
  const { row } = runs[0], own = row.column === column, width = Math.max(260, element.clientWidth);
  const { node } = curves(lines, {
    axis: x, width, height: width < 480 ? 240 : 320, each: seeds, band: !seeds, log,
    column: { label: column, decimals: own ? row.decimals : 4 }, label: column + (own && row.unit ? ` (${row.unit})` : ""),
  });
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", `${column} over ${AXES[x]} of ${runs.length === 1 ? "one run" : runs.length + " runs"}`);
  element.replaceChildren(node);
}
