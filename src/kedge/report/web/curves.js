// Curves over rounds, megabytes and seconds; drift; gains with their intervals.

/** The seeds of a run that are switched on, as series of points. */
function seriesOf(group, i, column, axis, seeds) {
  const curve = group.curves[i], block = curve[column.kind], values = block.y[column.key];
  const carried = group.runs[i].status === "stopped early";
  const own = values ? d3.range(curve.seeds.length).filter((s) => seeds.has(curve.seeds[s])) : [];
  return own.map((s) => {
    let before = null;
    const points = block.rounds.map((round, k) => {
      if (values[s][k] != null) before = values[s][k];
      return [round, axis === "round" ? round : block[axis][s][k], values[s][k] ?? (carried ? before : null)];
    });
    return { seed: curve.seeds[s], points: points.filter((point) => point[2] != null) };
  });
}

const spans = (values, ratio) => values.length && d3.min(values) > 0 && d3.max(values) / d3.min(values) > ratio;

/** One chart of curves. */
function curvePlot(group, column, axis, on, seeds, each, width) {
  const shown = group.runs.map((run, i) => ({ run, i })).filter(({ run, i }) => on.has(i) && !(axis === "mb" && run.yardstick));
  const lines = shown.map(({ run, i }) => {
    const series = seriesOf(group, i, column, axis, seeds);
    return { run, series, rows: means(series) };
  }).filter((line) => line.rows.length);
  const rows = lines.flatMap((line) => line.rows);
  const { node, all, logY } = curves(lines, {
    axis, column, width, each, height: Math.round(Math.min(420, Math.max(260, width * 0.42))),
    logX: axis !== "round" && spans(lines.map((line) => line.rows.at(-1).x), 8) && rows.every((d) => d.x > 0),
    log: (column.kind === "train" || column.key === "loss") && spans(rows.map((d) => d.mean), 60),
    target: column === group.columns[0] ? group.target : 0, unit: column.unit ? ` ${column.unit}` : "",
  });
  const table = all.map((d) => ({ method: d.run, round: d.round, [axis === "round" ? "x" : axis]: d.x, [column.key]: d.mean, sd: d.sd ?? "", n: d.n }));
  return { node, rows: table, logY, empty: !all.length };
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
  const known = [...on].some((i) => means(seriesOf(group, i, column, "round", seeds)).some((d) => d.mean > 0));
  if (!known) { figure.remove(); return; }
  if (on.size > 1) {
    const legend = el("div", { class: "legend" });
    for (const i of on) legend.append(el("span", {}, swatch(group.runs[i]), clip(group.runs[i].name, 40)));
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
