// What the page of a report and the board share: elements, numbers as text, means over seeds, curves.
const TIP = { fill: "var(--paper)", stroke: "var(--line)", lineHeight: 1.25 };
const DASHES = ["", "6 3", "2 3"];
const AXES = { round: "round", mb: "MB sent and received by all clients", s: "seconds of a seed" };

/** An element with properties and children, of which empty ones are left out; texts are text, never HTML. */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (key.startsWith("aria-")) node.setAttribute(key, value);
    else if (value === false || value == null) continue;
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  return fill(node, ...children);
}

/** Put children in the place of those that an element has. */
function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== false && child != null));
  return node;
}

/** Copy a text, and say so on the button for a while. */
async function copy(text, button) {
  const before = button.textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = el("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

const colour = (run) => `var(--c${run.colour})`;
/** The line of a run in a legend; the first eight have plain lines. */
const styled = (i) => ({ colour: i % 8, dash: Math.floor(i / 8) % 3 });
const swatch = (run) => el("span", { class: `swatch c${run.colour} d${run.dash}` });
const finite = (v) => typeof v === "number" && Number.isFinite(v);
const clip = (text, n) => (text.length > n ? text.slice(0, n - 1) + "…" : text);
const fixed = (v, n) => (finite(v) ? v.toFixed(n).replace(/^-(?=0\.?0*$)/, "").replace("-", "−") : "");
const signed = (v, n) => (finite(v) ? (v > 0 ? "+" : "") + fixed(v, n) : "");
const spread = (v, sd, n) => fixed(v, n) + (finite(sd) ? ` ± ${fixed(sd, n)}` : "");
const digits = (v) => (finite(v) ? (Number.isInteger(v) ? String(v) : d3.format(".4~g")(v)).replace("-", "−") : "");

/** Means over seeds by round. `series` are {seed, points}, points are [round, x, value]; with `whole` only rounds that all seeds have. */
function means(series, whole = false) {
  const at = new Map();
  for (const { seed, points } of series) {
    for (const [round, x, value] of points) {
      if (!at.has(round)) at.set(round, { round, xs: [], values: [], each: [] });
      const one = at.get(round);
      if (x != null) one.xs.push(x);
      one.values.push(value);
      one.each.push([seed, value]);
    }
  }
  const found = [...at.values()].filter((one) => one.xs.length && (!whole || one.values.length === series.length));
  return d3.sort(found, (one) => one.round).map(({ round, xs, values, each }) => (
    { round, x: d3.mean(xs), mean: d3.mean(values), sd: d3.deviation(values) ?? null, n: values.length, each }));
}

/** Curves over rounds, megabytes or seconds. `lines` are {run, rows, series}, with rows of `means`. */
function curves(lines, { axis, column, width, height, each = false, band = true, log = false, logX = false, label = null, target = 0, unit = "" }) {
  const all = lines.flatMap(({ run, rows }) => rows.map((d) => ({ ...d, run: run.name })));
  const across = [...all.map((d) => d.x), ...(each ? lines.flatMap((l) => l.series.flatMap((one) => one.points.map((p) => p[1]))) : [])];
  const fine = all.every((d) => d.mean > 0), logY = log && fine, marks = [];
  for (const { run, rows, series } of lines) {
    if (band && rows.some((d) => d.sd)) {
      const low = (d) => (logY ? Math.max(d.mean - d.sd, d.mean / 1e3) : d.mean - d.sd);
      marks.push(Plot.areaY(rows, { x: "x", y1: low, y2: (d) => d.mean + d.sd, fill: colour(run), fillOpacity: 0.12 }));
    }
    const single = series.flatMap(({ seed, points }) => points.map(([, x, v]) => ({ x, v, seed })));
    if (each && series.length > 1) marks.push(Plot.line(single, { x: "x", y: "v", z: "seed", stroke: colour(run), strokeWidth: 0.8, strokeOpacity: 0.5 }));
  }
  for (const { run, rows } of lines) {
    marks.push(Plot.line(rows, { x: "x", y: "mean", stroke: colour(run), strokeWidth: run.best ? 2.4 : 1.6, strokeDasharray: run.yardstick ? "1 4" : DASHES[run.dash], strokeLinecap: "round" }));
    if (rows.length < 4) marks.push(Plot.dot(rows, { x: "x", y: "mean", fill: colour(run), r: 2.5 }));
  }
  const words = (d) => [
    d.run,
    `${column.label} ${spread(d.mean, d.sd, column.decimals)}${unit}${d.n > 1 ? ` (n = ${d.n})` : ""}`,
    axis === "round" ? `round ${d.round}` : `${digits(d.x)} ${axis === "mb" ? "MB" : "s"}, round ${d.round}`,
    d.n > 1 ? d.each.map(([seed, v]) => `seed ${seed}: ${fixed(v, column.decimals)}`).slice(0, 6).join("\n") : "",
  ].filter(Boolean).join("\n");
  const near = { x: "x", y: "mean", maxRadius: 160 }, count = Math.max(3, Math.round(width / 90));
  if (target) marks.push(Plot.ruleY([target], { stroke: "var(--soft)", strokeDasharray: "3 3" }));
  marks.push(Plot.dot(all, Plot.pointer({ ...near, r: 4, fill: "var(--ink)" })));
  marks.push(Plot.tip(all, Plot.pointer({ ...near, title: words, ...TIP })));
  const rounds = axis === "round" && all.length ? d3.ticks(...d3.extent(across), count).filter(Number.isInteger) : count;
  const node = Plot.plot({
    width, height, marginLeft: 48, marginRight: 14, marginBottom: 38, marginTop: label ? 26 : undefined, insetTop: 4,
    x: { label: AXES[axis] + (logX ? " (log scale)" : ""), type: logX ? "log" : "linear", ticks: logX ? 5 : rounds, tickFormat: (v) => (axis === "round" ? d3.format(",")(v) : d3.format(v >= 1e5 ? "~s" : ",~g")(v)), labelAnchor: "center", labelArrow: "none" },
    y: { label, labelArrow: "none", type: logY ? "log" : "linear", ticks: logY ? 4 : 6, grid: true, nice: !logY, tickFormat: logY ? "~g" : undefined },
    marks,
  });
  return { node, all, logY };
}
