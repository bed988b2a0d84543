// Charts of diagnoses, from plain rows; then all figures of the page.
function drawSheet(figure, spec) {
  const series = [...new Set(spec.rows.map((d) => d.series ?? ""))];
  const run = (name) => { const i = series.indexOf(name ?? ""); return { ...styled(i), colour: (i + 1) % 8 }; };
  if (series.length > 1) {
    const legend = figure.querySelector(".legend");
    for (const name of series) legend.append(el("span", {}, swatch(run(name)), clip(String(name), 40)));
  }
  const rows = spec.rows.map((d) => ({ ...d, series: d.series ?? "" }));
  const words = (d) => [d.label, d.series, `${spec.x || "x"}: ${typeof d.x === "number" ? digits(d.x) : d.x}`, `${spec.y || "y"}: ${typeof d.y === "number" ? digits(d.y) : d.y}`, d.value === undefined ? "" : `${spec.value || "value"}: ${digits(d.value)}`].filter(Boolean).join("\n");
  const numeric = rows.every((d) => d.x == null || finite(d.x)), whole = numeric && rows.every((d) => Number.isInteger(d.x));
  const axis = { label: spec.x || null, labelAnchor: "center", labelArrow: "none", ...(whole && spec.kind === "lines" ? { tickFormat: (v) => (Number.isInteger(v) ? d3.format(",")(v) : "") } : {}) };
  const style = (width) => ({ width, height: Math.round(Math.min(380, Math.max(230, width * 0.4))), marginLeft: 52, marginRight: 14, marginBottom: 40, marginTop: spec.y ? 32 : 14, y: { label: spec.y || null, grid: true, nice: true, ticks: 6, labelArrow: "none", labelAnchor: "top" } });
  const kinds = {
    lines: (width) => Plot.plot({ ...style(width), x: { ...axis, ...(numeric ? {} : { type: "point", tickFormat: (t) => clip(String(t), 14) }) }, marks: [
      ...series.map((name) => { const own = rows.filter((d) => d.series === name && finite(d.y)); return Plot.line(own, { x: "x", y: "y", stroke: colour(run(name)), strokeWidth: 1.7, strokeDasharray: DASHES[run(name).dash], marker: own.length < 12 ? "dot" : undefined }); }),
      Plot.tip(rows.filter((d) => finite(d.y)), Plot.pointer({ x: "x", y: "y", title: words, ...TIP })),
    ] }),
    points: (width) => Plot.plot({ ...style(width), height: Math.round(Math.min(520, Math.max(280, width * 0.6))), x: { ...axis, nice: true, ...(numeric ? {} : { type: "point" }) }, marks: [
      Plot.dot(rows, { x: "x", y: "y", r: rows.length > 800 ? 2 : 3.2, fill: (d) => colour(run(d.series)), fillOpacity: 0.75 }),
      ...(rows.length <= 12 && width > 480 ? [Plot.text(rows.filter((d) => d.label), { x: "x", y: "y", text: (d) => clip(String(d.label), 18), dy: -9, fill: "var(--soft)", fontSize: 11 })] : []),
      Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: words, ...TIP })),
    ] }),
    bars: (width) => {
      const xs = [...new Set(rows.map((d) => d.x))], many = xs.length * series.length > width / 14, longest = d3.max(xs, (x) => String(x).length) || 1;
      const turned = 6.8 * Math.min(longest, 18) > (width - 66) / xs.length && xs.length <= 40, step = xs.length > 40 ? Math.ceil(xs.length * (6.8 * Math.min(longest, 18) + 10) / (width - 66)) : 1;
      const grouped = series.length > 1, full = Math.min(width, 80 + xs.length * series.length * 110);
      return Plot.plot({
        ...style(full), height: Math.min(380, Math.max(230, width * 0.32)), marginBottom: turned ? 22 + Math.min(longest, 18) * 5.2 : 40,
        ...(grouped ? { fx: { ...axis, domain: xs, padding: 0.15, tickSize: 0, tickRotate: turned ? -40 : 0, tickFormat: (t) => (xs.indexOf(t) % step ? "" : clip(String(t), 18)) }, x: { axis: null, domain: series, padding: 0.05 } } : { x: { ...axis, type: "band", domain: xs, padding: many ? 0.05 : 0.25, tickSize: 0, tickRotate: turned ? -40 : 0, tickFormat: (t) => (xs.indexOf(t) % step ? "" : clip(String(t), 18)) } }),
        marks: [
          Plot.barY(rows, { ...(grouped ? { fx: "x", x: "series" } : { x: "x" }), y: "y", fill: (d) => colour(run(d.series)) }), Plot.ruleY([0], { stroke: "var(--soft)" }),
          Plot.tip(rows, Plot.pointerX({ ...(grouped ? { fx: "x", x: "series" } : { x: "x" }), y: "y", title: words, ...TIP })),
        ],
      });
    },
    heatmap: (width) => {
      const xs = [...new Set(rows.map((d) => d.x))], ys = [...new Set(rows.map((d) => d.y))];
      const known = rows.filter((d) => finite(d.value)), extent = d3.extent(known, (d) => d.value), both = extent[0] < 0 && extent[1] > 0;
      const most = Math.max(Math.abs(extent[0]), Math.abs(extent[1])) || 1, space = room(ys.map((t) => clip(String(t), 30)), width);
      const full = Math.min(width, space.pixels + 20 + xs.length * 70), cell = (full - space.pixels - 10) / xs.length, high = Math.max(ys.length > 30 ? 8 : 18, Math.min(34, cell));
      const write = alike(known.map((d) => d.value));
      const cellRows = known.map((d) => ({ x: d.x, y: d.y, text: write(d.value), fill: both && d.value < 0 ? "var(--loss)" : both ? "var(--gain)" : "var(--accent)", shade: both ? 0.04 + 0.8 * Math.abs(d.value) / most : 0.05 + 0.85 * (d.value - extent[0]) / (extent[1] - extent[0] || 1), title: words(d) }));
      const longest = d3.max(xs, (x) => String(x).length), turned = 6.8 * Math.min(longest, 18) > cell && xs.length <= 60;
      const stepX = xs.length > 60 ? Math.ceil((6.8 * Math.min(longest, 18) + 10) / cell) : 1, stepY = Math.ceil(ys.length * 12 / (ys.length * high));
      const bottom = turned ? 24 + Math.min(longest, 18) * 5 : 38;
      return Plot.plot({
        width: full, height: ys.length * high + bottom + 28, marginLeft: space.pixels, marginRight: 10, marginTop: spec.y ? 28 : 8, marginBottom: bottom,
        x: { ...axis, type: "band", domain: xs, tickSize: 0, tickRotate: turned ? -40 : 0, tickFormat: (t) => (xs.indexOf(t) % stepX ? "" : clip(String(t), 18)) },
        y: { label: spec.y || null, labelArrow: "none", labelAnchor: "top", type: "band", domain: ys, tickSize: 0, tickFormat: (t) => (ys.indexOf(t) % stepY ? "" : clip(String(t), space.chars)) },
        marks: cells(cellRows, { text: cell > 7 + 6.2 * d3.max(cellRows, (d) => d.text.length) && high > 15, inset: cell < 8 ? 0 : 0.5 }),
      });
    },
  };
  chart(figure, (width) => ({ node: kinds[spec.kind](width), rows: spec.rows }))();
}

const DRAW = { curves: drawCurves, gains: drawGains, classes: drawClasses, clients: drawClients, partition: drawPartition, drift: drawDrift, objective: drawObjective };
const figures = [...document.querySelectorAll("figure.chart")];
const begin = (figure) => {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  if (figure.dataset.draw === "sheet") drawSheet(figure, DATA.sheets[figure.dataset.sheet].charts[figure.dataset.chart]);
  else DRAW[figure.dataset.draw](figure, DATA.groups[figure.closest("[data-group]").dataset.group]);
};
if (figures.length <= 24) figures.forEach(begin);
else {
  const watcher = new IntersectionObserver((entries) => { for (const one of entries) if (one.isIntersecting) { watcher.unobserve(one.target); begin(one.target); } }, { rootMargin: "800px" });
  figures.forEach((figure) => watcher.observe(figure));
  addEventListener("beforeprint", () => figures.forEach(begin));
}
document.documentElement.dataset.ready = "yes";
