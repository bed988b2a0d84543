// Points of curves: what the page has is kept, the server sends what is new.

import { ask } from "./store.js";

const kept = new Map(); // "id column" -> {epoch, seeds}
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

export const have = (id, column) => kept.get(`${id} ${column}`)?.seeds || [];

// Mean over the seeds at the rounds that all of them have; as far as each seed goes.
export function mean(seeds) {
  const begun = seeds.filter((seed) => seed.round.length);
  if (!begun.length) return [];
  const at = new Map();
  for (const seed of begun) {
    seed.round.forEach((round, i) => {
      const one = at.get(round) || { round, mb: 0, seconds: 0, values: [] };
      one.mb += seed.mb[i];
      one.seconds += seed.seconds[i];
      one.values.push(seed.value[i]);
      at.set(round, one);
    });
  }
  const whole = [...at.values()].filter((one) => one.values.length === begun.length);
  return whole.sort((a, b) => a.round - b.round).map(({ round, mb, seconds, values }) => {
    const n = values.length, average = d3.mean(values);
    return { round, mb: mb / n, seconds: seconds / n, value: average, sd: d3.deviation(values) ?? null, n };
  });
}
