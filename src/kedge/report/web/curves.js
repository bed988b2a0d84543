// Curves over rounds, megabytes and seconds; drift; gains with their intervals.

/** The points of a run: mean and standard deviation over the seeds that are switched on. */
function points(group, i, column, axis, seeds) {
  const curve = group.curves[i], block = curve[column.kind], run = group.runs[i];
  const own = d3.range(curve.seeds.length).filter((s) => seeds.has(curve.seeds[s]));
  const values = block.y[column.key];
  if (!values) return [];
  const carried = run.status === "stopped early";
  const at = own.map((s) => {
    let before = null;
    return values[s].map((v) => { if (v != null) before = v; return v ?? (carried ? before : null); });
  });
  const found = [];
  for (const [k, round] of block.rounds.entries()) {
    const known = own.map((s, j) => ({ s, v: at[j][k] })).filter((p) => p.v != null);
    if (!known.length) continue;
    const xs = axis === "round" ? [round] : known.map((p) => block[axis][p.s][k]).filter((v) => v != null);
    if (!xs.length) continue;
    const numbers = known.map((p) => p.v);
    found.push({ run: run.name, round, x: mean(xs), mean: mean(numbers), sd: d3.deviation(numbers) ?? null, n: numbers.length, each: known.map((p) => [curve.seeds[p.s], p.v]) });
  }
  return found;
}

const AXES = { round: "round", mb: "MB sent and received by all clients", s: "seconds of a seed" };
const spans = (values, ratio) => values.length && d3.min(values) > 0 && d3.max(values) / d3.min(values) > ratio;

/** One chart of curves. */
function curvePlot(group, column, axis, on, seeds, each, width) {
  const shown = group.runs.map((run, i) => ({ run, i })).filter(({ run, i }) => on.has(i) && !(axis === "mb" && run.yardstick));
  const lines = shown.map(({ run, i }) => ({ run, rows: points(group, i, column, axis, seeds) })).filter((l) => l.rows.length);
  const all = lines.flatMap((l) => l.rows);
  const ends = lines.map((l) => l.rows.at(-1).x);
  const logX = axis !== "round" && spans(ends, 8) && all.every((d) => d.x > 0);
  const logY = (column.kind === "train" || column.key === "loss") && spans(all.map((d) => d.mean), 60);
  const marks = [];
  for (const { run, rows } of lines) {
    if (rows.some((d) => d.sd)) {
      const low = (d) => (logY ? Math.max(d.mean - d.sd, d.mean / 1e3) : d.mean - d.sd);
      marks.push(Plot.areaY(rows, { x: "x", y1: low, y2: (d) => d.mean + d.sd, fill: colour(run), fillOpacity: 0.12 }));
    }
    if (each) {
      const rowsOf = rows.flatMap((d) => d.each.map(([seed, v]) => ({ x: d.x, v, seed })));
      marks.push(Plot.line(rowsOf, { x: "x", y: "v", z: "seed", stroke: colour(run), strokeWidth: 0.7, strokeOpacity: 0.55 }));
    }
  }
  for (const { run, rows } of lines) {
    marks.push(Plot.line(rows, { x: "x", y: "mean", stroke: colour(run), strokeWidth: run.best ? 2.4 : 1.6, strokeDasharray: run.yardstick ? "1 4" : DASHES[run.dash], strokeLinecap: "round" }));
    if (rows.length < 4) marks.push(Plot.dot(rows, { x: "x", y: "mean", fill: colour(run), r: 2.5 }));
  }
  const unit = column.unit ? ` ${column.unit}` : "";
  const words = (d) => [
    d.run,
    `${fixed(d.mean, column.decimals)}${unit}${d.sd != null ? ` ± ${fixed(d.sd, column.decimals)}` : ""}`,
    axis === "round" ? `round ${d.round}` : `${digits(d.x)} ${axis === "mb" ? "MB" : "s"}, round ${d.round}`,
    d.n > 1 ? d.each.map(([seed, v]) => `seed ${seed}: ${fixed(v, column.decimals)}`).slice(0, 6).join("\n") : "",
  ].filter(Boolean).join("\n");
  if (group.target && column === group.columns[0]) marks.push(Plot.ruleY([group.target], { stroke: "var(--soft)", strokeDasharray: "3 3" }));
  marks.push(Plot.dot(all, Plot.pointer({ x: "x", y: "mean", r: 4, fill: "var(--ink)" })));
  marks.push(Plot.tip(all, Plot.pointer({ x: "x", y: "mean", title: words, ...TIP })));
  const node = Plot.plot({
    width, height: Math.round(Math.min(420, Math.max(260, width * 0.42))), marginLeft: 48, marginRight: 14, marginBottom: 38, insetTop: 4,
    x: { label: AXES[axis] + (logX ? " (log scale)" : ""), type: logX ? "log" : "linear", ticks: axis === "round" ? d3.ticks(...d3.extent(all, (d) => d.x), Math.max(3, Math.round(width / 90))).filter(Number.isInteger) : logX ? 5 : Math.max(3, Math.round(width / 90)), tickFormat: (v) => (axis === "round" ? d3.format(",")(v) : d3.format(v >= 1e5 ? "~s" : ",~g")(v)), labelAnchor: "center", labelArrow: "none" },
    y: { label: null, type: logY ? "log" : "linear", ticks: logY ? 4 : 6, grid: true, nice: !logY, tickFormat: logY ? "~g" : undefined },
    marks,
  });
  const rows = all.map((d) => ({ method: d.run, round: d.round, [axis === "round" ? "x" : axis]: d.x, [column.key]: d.mean, sd: d.sd ?? "", n: d.n }));
  return { node, rows, logY, empty: !all.length };
}

function drawCurves(figure, group) {
  const seeds = [...new Set(group.curves.flatMap((c) => c.seeds))].sort((a, b) => a - b);
  const state = { column: group.columns[0], axis: "round", on: new Set(group.runs.flatMap((r, i) => (r.on ? [i] : []))), seeds: new Set(seeds), each: false };
  const controls = figure.querySelector(".controls"), note = figure.querySelector(".note");
  const again = chart(figure, (width) => {
    const drawn = curvePlot(group, state.column, state.axis, state.on, state.seeds, state.each, width);
    const unit = state.column.unit ? ` in ${state.column.unit}` : "";
    const n = state.seeds.size;
    const spread = n > 1 ? `mean of ${n} seeds, band: one standard deviation` : "one seed";
    const hidden = group.runs.length - state.on.size;
    note.textContent = `${state.column.label}${unit}${drawn.logY ? " (log scale)" : ""}; ${spread}${state.axis === "round" ? "" : "; across: the mean over seeds"}${state.axis === "mb" && group.runs.some((r) => r.yardstick) ? "; a yardstick sends nothing" : ""}${hidden ? `; ${state.on.size} of ${group.runs.length} shown` : ""}.`;
    return drawn.empty ? { node: el("p", { class: "note" }, "Nothing is switched on."), rows: [] } : drawn;
  });
  controls.append(
    choice("over", [["round", "rounds"], ["mb", "MB"], ["s", "seconds"]], state.axis, (v) => { state.axis = v; again(); }),
    menu("what", group.columns.map((c) => [c.key, c.label + (c.unit ? ` ${c.unit}` : "")]), state.column.key, (key) => { state.column = group.columns.find((c) => c.key === key); again(); }),
  );
  if (seeds.length > 1) {
    controls.append(
      choice("seeds", [["mean", "mean"], ["each", "each seed"]], "mean", (v) => { state.each = v === "each"; again(); }),
      chips("seeds", seeds.map((s) => ({ key: s, text: `seed ${s}` })), state.seeds, again),
    );
  }
  const items = group.runs.map((run, i) => ({ key: i, text: run.name, run }));
  if (items.length > 24) items.sort((a, b) => b.run.on - a.run.on);
  if (items.length > 1) controls.append(chips("methods", items, state.on, again));
  again();
}

function drawDrift(figure, group) {
  const column = group.columns.find((c) => c.key === "divergence");
  const seeds = new Set(group.curves.flatMap((c) => c.seeds));
  const on = new Set(group.runs.flatMap((r, i) => (r.on && !r.yardstick ? [i] : [])));
  const known = [...on].some((i) => points(group, i, column, "round", seeds).some((d) => d.mean > 0));
  if (!known) { figure.remove(); return; }
  if (on.size > 1) {
    const legend = el("div", { class: "legend" });
    for (const i of on) legend.append(el("span", {}, el("span", { class: `swatch c${group.runs[i].colour} d${group.runs[i].dash}` }), clip(group.runs[i].name, 40)));
    figure.querySelector(".plot").before(legend);
  }
  chart(figure, (width) => curvePlot(group, column, "round", on, seeds, false, width))();
}

/** Gains over the first run with their intervals. */
function drawGains(figure, group) {
  const unit = group.metric.unit === "%" ? "points" : group.metric.unit;
  const rows = group.runs.map((run, i) => ({ run, gain: group.gains[i] })).filter((d) => d.gain && finite(d.gain.mean));
  if (rows.length > 8) rows.sort((a, b) => b.gain.mean - a.gain.mean);
  chart(figure, (width) => {
    const names = rows.map((d) => d.run.name), space = room(names, width), n = group.metric.decimals;
    const words = (d) => `${d.run.name}\n${signed(d.gain.mean, n)} ${unit}${finite(d.gain.low) ? `\n95 %: ${signed(d.gain.low, n)} to ${signed(d.gain.high, n)}` : "\none seed"}\n${d.gain.n} seed${d.gain.n > 1 ? "s" : ""}`;
    const node = Plot.plot({
      width, height: Math.max(90, rows.length * 26 + 46), marginLeft: space.pixels, marginRight: 64, marginBottom: 36,
      x: { label: `${group.metric.name}, ${unit ? unit + ", " : ""}positive is better`.replace(", ,", ","), labelAnchor: "center", labelArrow: "none", grid: true, nice: true, ticks: Math.max(3, width / 110), ...around(rows.flatMap((d) => [d.gain.mean, d.gain.low, d.gain.high])) },
      y: { label: null, domain: names, tickSize: 0, tickFormat: (t) => clip(t, space.chars) },
      marks: [
        Plot.ruleX([0], { stroke: "var(--ink)" }),
        Plot.ruleY(rows.filter((d) => finite(d.gain.low)), { y: (d) => d.run.name, x1: (d) => d.gain.low, x2: (d) => d.gain.high, stroke: (d) => colour(d.run), strokeWidth: 2 }),
        Plot.dot(rows, { y: (d) => d.run.name, x: (d) => d.gain.mean, r: 4.5, fill: (d) => colour(d.run) }),
        Plot.text(rows, { y: (d) => d.run.name, frameAnchor: "right", textAnchor: "start", dx: 8, text: (d) => signed(d.gain.mean, n), fill: "var(--ink)", fontVariant: "tabular-nums" }),
        Plot.tip(rows, Plot.pointerY({ y: (d) => d.run.name, x: (d) => d.gain.mean, title: words, ...TIP })),
      ],
    });
    return { node, rows: rows.map((d) => ({ method: d.run.name, gain: d.gain.mean, low: d.gain.low ?? "", high: d.gain.high ?? "", n: d.gain.n })) };
  })();
}
