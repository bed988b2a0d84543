// By class, by client, the partition, and the settings of a sweep.

/** Cells shaded by opacity, so that both themes need one colour only. */
function cells(rows, options) {
  return [
    Plot.cell(rows, { x: "x", y: "y", fill: (d) => d.fill || "var(--accent)", fillOpacity: "shade", inset: options.inset ?? 0.5, rx: options.inset === 0 ? 0 : 1.5 }),
    ...(options.text ? [Plot.text(rows, { x: "x", y: "y", text: "text", fill: (d) => (d.shade > 0.66 ? "var(--paper)" : "var(--ink)"), fontSize: 11, fontVariant: "tabular-nums" })] : []),
    Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: "title", ...TIP })),
  ];
}

function drawClasses(figure, group) {
  const { classes, values, metric } = group.classes, n = 2; // in percent, whatever runs are compared by
  const first = group.base, several = values.length > 1 && values[first];
  const state = { mode: "value" };
  const again = chart(figure, (width) => {
    const names = group.runs.map((r) => r.name), space = room(names, width);
    const gains = state.mode === "gain";
    const rows = [];
    group.runs.forEach((run, i) => {
      if (!values[i] || (gains && i === first)) return;
      classes.forEach((name, c) => {
        const v = values[i][c], base = values[first]?.[c];
        const shownValue = gains ? (finite(v) && finite(base) ? v - base : null) : v;
        if (!finite(shownValue)) return;
        rows.push({ x: c, y: run.name, v: shownValue, title: `${run.name}\nclass ${name}: ${fixed(v, n)} %${i !== first && finite(base) ? `\n${signed(v - base, n)} against ${group.runs[first].name}` : ""}` });
      });
    });
    const extent = d3.extent(rows, (d) => d.v), most = d3.max(rows, (d) => Math.abs(d.v)) || 1;
    const longest = d3.max(classes, (c) => c.length), wide = Math.max(64, Math.min(170, 6.8 * longest + 16));
    const full = Math.min(width, space.pixels + 10 + classes.length * wide), cell = (full - space.pixels - 10) / classes.length;
    for (const d of rows) {
      d.fill = gains ? (d.v >= 0 ? "var(--gain)" : "var(--loss)") : "var(--accent)";
      d.shade = gains ? 0.04 + 0.76 * Math.abs(d.v) / most : 0.05 + 0.75 * (d.v - extent[0]) / (extent[1] - extent[0] || 1);
      d.text = gains ? signed(d.v, cell > 42 ? 1 : 0) : fixed(d.v, cell > 42 ? 1 : 0);
    }
    const shown = names.filter((name) => rows.some((d) => d.y === name));
    const turned = 6.6 * Math.min(longest, 18) > cell && classes.length <= 60;
    const step = classes.length > 60 ? Math.ceil((6.6 * Math.min(longest, 18) + 10) / cell) : 1;
    const node = Plot.plot({
      width: full, height: shown.length * (shown.length > 20 ? 20 : 27) + (turned ? 40 + Math.min(longest, 18) * 5 : 40), marginLeft: space.pixels, marginRight: 10, marginTop: 4, marginBottom: turned ? 20 + Math.min(longest, 18) * 5 : 36,
      x: { label: "class", domain: d3.range(classes.length), tickFormat: (c) => (c % step ? "" : clip(classes[c], turned ? 18 : 26)), tickRotate: turned ? -40 : 0, tickSize: 0, labelArrow: "none", labelAnchor: "center" },
      y: { label: null, domain: shown, tickSize: 0, tickFormat: (t) => clip(t, space.chars) },
      marks: cells(rows, { text: cell > 26, inset: cell < 8 ? 0 : 0.5 }),
    });
    return { node, rows: rows.map((d) => ({ method: d.y, class: classes[d.x], [state.mode]: d.v })) };
  });
  if (several) figure.querySelector(".controls").append(choice("shown", [["value", `${metric}, %`], ["gain", `gain over ${clip(group.runs[first].name, 24)}`]], "value", (v) => { state.mode = v; again(); }));
  again();
}

/** A number between -1 and 1 that is always the same for a dot. */
const jitter = (i) => ((i * 0.618034) % 1) * 2 - 1;

function drawClients(figure, group) {
  const { dots, summary } = group.clients, n = group.metric.decimals, sign = group.metric.higher ? 1 : -1, directed = group.metric.higher !== null;
  const unit = group.metric.unit, several = group.runs.length > 1, first = group.base;
  const label = (d) => d.client + (d.seed == null ? "" : `, seed ${d.seed}`);
  if (!several) {
    chart(figure, (width) => {
      const rows = dots.map((d) => ({ client: label(d), v: d.values[0] })).filter((d) => finite(d.v)).sort((a, b) => sign * (a.v - b.v));
      rows.forEach((d, i) => { d.rank = i + 1; });
      const node = Plot.plot({
        width, height: 260, marginLeft: 48, marginBottom: 36,
        x: { label: directed ? "clients, worst first" : "clients, by value", labelAnchor: "center", labelArrow: "none", ticks: [] },
        y: { label: null, grid: true, nice: true },
        marks: [
          Plot.ruleY([d3.mean(rows, (d) => d.v)], { stroke: "var(--soft)", strokeDasharray: "3 3" }),
          Plot.dot(rows, { x: "rank", y: "v", fill: "var(--accent)", r: rows.length > 150 ? 2 : 3.5 }),
          Plot.tip(rows, Plot.pointerX({ x: "rank", y: "v", title: (d) => `${d.client}\n${fixed(d.v, n)} ${unit}`, ...TIP })),
        ],
      });
      return { node, rows: rows.map((d) => ({ client: d.client, value: d.v })) };
    })();
    return;
  }
  const state = { mode: directed ? "gain" : "value" };
  const again = chart(figure, (width) => {
    const gains = state.mode === "gain";
    const shown = group.runs.map((run, i) => ({ run, i })).filter(({ i }) => summary[i].n && !(gains && i === first));
    const rows = [];
    shown.forEach(({ run, i }, row) => dots.forEach((d, k) => {
      const v = d.values[i], base = d.values[first];
      const x = gains ? (finite(v) && finite(base) ? sign * (v - base) : null) : v;
      if (finite(x)) rows.push({ x, y: row + 0.3 * jitter(k), run, client: label(d), v, base, i });
    }));
    const space = room(shown.map((s) => s.run.name), width), narrow = width < 520;
    const height = shown.length * Math.max(20, Math.min(58, 420 / shown.length)) + 48;
    const node = Plot.plot({
      width, height, marginLeft: space.pixels, marginRight: gains ? (narrow ? 62 : 118) : 16, marginBottom: 36,
      x: { label: gains ? `gain of a client over ${clip(group.runs[first].name, 30)}${unit === "%" ? ", points" : ""}` : `${group.metric.name} ${unit}`.trim(), labelAnchor: "center", labelArrow: "none", grid: true, nice: true, ticks: Math.max(3, width / 110), ...around(rows.map((d) => d.x)) },
      y: { axis: null, domain: [shown.length - 0.5, -0.5] },
      marks: [
        ...(gains ? [Plot.ruleX([0], { stroke: "var(--ink)" })] : []),
        Plot.text(shown, { y: (s, k) => k, frameAnchor: "left", textAnchor: "end", dx: -10, text: (s) => clip(s.run.name, space.chars), fill: "var(--ink)" }),
        Plot.dot(rows, { x: "x", y: "y", r: rows.length > 2000 ? 1.8 : 3, fill: (d) => (gains ? (d.x > 0 ? "var(--gain)" : d.x < 0 ? "var(--loss)" : "var(--soft)") : colour(d.run)), fillOpacity: 0.65 }),
        ...(gains ? [Plot.text(shown, { y: (s, k) => k, frameAnchor: "right", textAnchor: "start", dx: 8, text: ({ i }) => (narrow ? `${summary[i].gain} ↑ ${summary[i].lose} ↓` : `${summary[i].gain} gain, ${summary[i].lose} lose`), fill: "var(--soft)" })] : []),
        Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: (d) => `${d.run.name}\n${d.client}: ${fixed(d.v, n)} ${unit}${directed && d.i !== first && finite(d.base) ? `\n${signed(sign * (d.v - d.base), n)} against ${group.runs[first].name}` : ""}`, ...TIP })),
      ],
    });
    return { node, rows: rows.map((d) => ({ method: d.run.name, client: d.client, value: d.v, gain: directed && d.i !== first && finite(d.base) ? sign * (d.v - d.base) : "" })) };
  });
  if (directed) figure.querySelector(".controls").append(choice("shown", [["gain", `gain over ${clip(group.runs[first].name, 24)}`], ["value", group.metric.name]], "gain", (v) => { state.mode = v; again(); }));
  again();
}

function drawPartition(figure, group) {
  const state = { at: 0 }, note = figure.querySelector(".note");
  const again = chart(figure, (width) => {
    const one = group.partition[state.at], count = one.names.length, rows = [];
    const classes = one.counts ? one.classes : null;
    const space = classes ? room(classes.map((c) => clip(c, 22)), width) : { pixels: 48, chars: 8 };
    const left = Math.max(48, space.pixels), cell = (width - left - 10) / count;
    const named = count <= 30 && one.names.some((name, k) => name !== `client ${k}`);
    const longest = d3.max(one.names, (name) => Math.min(18, name.length));
    const step = named ? 1 : Math.max(1, Math.ceil(count / Math.max(4, width / 36)));
    const sizes = one.sizes.map((v, k) => ({ x: k, v, title: `${one.names[k]}\n${v} samples` }));
    const bottom = named ? 14 + longest * 5.2 : 36;
    const axis = { domain: d3.range(count), label: named ? null : "client", labelAnchor: "center", labelArrow: "none", tickSize: 0, tickRotate: named ? -45 : 0, tickFormat: (k) => (named ? clip(one.names[k], 18) : k % step ? "" : String(k)), padding: cell < 5 ? 0 : 0.12 };
    const bars = Plot.plot({
      width, height: classes ? 74 : 220, marginLeft: left, marginRight: 10, marginTop: 8, marginBottom: classes ? 4 : bottom,
      x: classes ? { ...axis, axis: null } : axis, y: { label: null, ticks: 2, grid: true, tickFormat: "~s" },
      marks: [Plot.barY(sizes, { x: "x", y: "v", fill: "var(--soft)", fillOpacity: 0.55 }), Plot.tip(sizes, Plot.pointerX({ x: "x", y: "v", title: "title", ...TIP }))],
    });
    const node = el("div", {}, bars);
    if (classes) {
      const most = d3.max(one.counts, (row) => d3.max(row)) || 1;
      one.counts.forEach((row, k) => row.forEach((v, c) => { if (v) rows.push({ x: k, y: c, v, shade: 0.1 + 0.9 * Math.sqrt(v / most), text: String(v), title: `${one.names[k]}\nclass ${classes[c]}: ${v} of ${one.sizes[k]}` }); }));
      const height = Math.max(120, Math.min(460, classes.length * 22));
      const rowStep = Math.ceil(classes.length / (height / 15));
      node.append(Plot.plot({
        width, height: height + bottom, marginLeft: left, marginRight: 10, marginTop: 2, marginBottom: bottom, x: axis,
        y: { label: null, domain: d3.range(classes.length), tickSize: 0, tickFormat: (c) => (c % rowStep ? "" : clip(classes[c], space.chars)) },
        marks: cells(rows, { text: cell > 30 && height / classes.length > 15, inset: cell < 6 || height / classes.length < 6 ? 0 : 0.5 }),
      }));
    }
    note.textContent = `${classes ? "Bars: training samples of each client. Below: how many of each class" : "Training samples of each client"}; seed ${one.seed}${one.hash ? `, partition ${one.hash}` : ""}.${one.left_out ? ` ${one.left_out} more clients are not shown.` : ""}`;
    return { node, rows: classes ? one.counts.flatMap((row, k) => row.map((v, c) => ({ client: one.names[k], class: classes[c], samples: v }))) : sizes.map((d) => ({ client: one.names[d.x], samples: d.v })) };
  });
  const seeds = group.partition.map((one, i) => [String(i), `seed ${one.seed}`]);
  if (seeds.length > 1) {
    const pick = (i) => { state.at = Number(i); again(); };
    figure.querySelector(".controls").append(seeds.length > 6 ? menu("seed", seeds, "0", pick) : choice("seed", seeds, "0", pick));
  }
  again();
}

/** What the settings of a sweep reach: one key as a line, two as a table of cells, more as dots. */
function drawObjective(figure, group) {
  const { keys, rows: settings } = group.objective, n = group.metric.decimals, unit = group.metric.unit;
  const known = settings.filter((d) => finite(d.mean));
  if (!known.length) { figure.remove(); return; }
  const best = known.reduce((a, b) => ((group.metric.higher ? b.mean > a.mean : b.mean < a.mean) ? b : a));
  const words = (d) => keys.map((key, k) => `${key} = ${d.texts[k]}`).join("\n") + `\n${fixed(d.mean, n)} ${unit}${finite(d.sd) ? ` ± ${fixed(d.sd, n)}` : ""}`;
  const table = settings.map((d) => Object.fromEntries([...keys.map((key, k) => [key, d.texts[k]]), ["mean", d.mean ?? ""], ["sd", d.sd ?? ""]]));
  const one = (k, width) => {
    const numbers = known.every((d) => finite(d.values[k]) && d.values[k] > 0);
    const distinct = [...new Set(settings.map((d) => d.texts[k]))];
    const x = numbers ? (d) => d.values[k] : (d) => d.texts[k];
    const log = numbers && d3.max(known, x) / d3.min(known, x) >= 10;
    return Plot.plot({
      width, height: Math.min(320, Math.max(220, width * 0.4)), marginLeft: 48, marginBottom: 40, insetLeft: 14, insetRight: 14,
      x: { label: keys[k] + (log ? " (log scale)" : ""), labelAnchor: "center", labelArrow: "none", type: numbers ? (log ? "log" : "linear") : "point", ticks: numbers ? [...new Set(known.map(x))].slice(0, 12) : undefined, tickFormat: numbers ? "~g" : (t) => clip(t, 14), domain: numbers ? undefined : distinct },
      y: { label: null, grid: true, nice: true },
      marks: [
        ...(keys.length === 1 ? [Plot.line(d3.sort(known, (a, b) => (numbers ? x(a) - x(b) : 0)), { x, y: "mean", stroke: "var(--accent)", strokeOpacity: 0.4 }), Plot.ruleX(known.filter((d) => d.sd), { x, y1: (d) => d.mean - d.sd, y2: (d) => d.mean + d.sd, stroke: "var(--accent)" })] : []),
        Plot.dot(known, { x, y: "mean", r: 4, fill: "var(--accent)", fillOpacity: keys.length === 1 ? 1 : 0.5 }),
        Plot.dot([best], { x, y: "mean", r: 6.5, stroke: "var(--ink)", strokeWidth: 1.5 }),
        Plot.tip(known, Plot.pointer({ x, y: "mean", title: words, ...TIP })),
      ],
    });
  };
  chart(figure, (width) => {
    if (keys.length === 1) return { node: one(0, Math.min(width, 720)), rows: table };
    if (keys.length > 2) {
      const columns = Math.max(1, Math.min(keys.length, Math.floor(width / 300)));
      const node = el("div", { class: "multiples" });
      keys.forEach((key, k) => node.append(one(k, Math.floor((width - 24 * (columns - 1)) / columns))));
      return { node, rows: table };
    }
    const extent = d3.extent(known, (d) => d.mean);
    const cellRows = known.map((d) => {
      const part = (d.mean - extent[0]) / (extent[1] - extent[0] || 1);
      return { x: d.texts[1], y: d.texts[0], text: fixed(d.mean, Math.min(n, 3)), shade: 0.06 + 0.8 * (group.metric.higher ? part : 1 - part), title: words(d), best: d === best };
    });
    const xs = [...new Set(settings.map((d) => d.texts[1]))], ys = [...new Set(settings.map((d) => d.texts[0]))], space = room(ys, width);
    const full = Math.min(width, space.pixels + 20 + xs.length * 110);
    const node = Plot.plot({
      width: full, height: ys.length * 34 + 72, marginLeft: space.pixels, marginBottom: 42, marginTop: 28,
      x: { label: keys[1], domain: xs, tickSize: 0, labelAnchor: "center", labelArrow: "none", tickFormat: (t) => clip(t, 16) }, y: { label: keys[0], domain: ys, tickSize: 0, labelArrow: "none", labelAnchor: "top", tickFormat: (t) => clip(t, space.chars) },
      marks: [...cells(cellRows, { text: (full - space.pixels) / xs.length > 40 }), Plot.cell(cellRows.filter((d) => d.best), { x: "x", y: "y", stroke: "var(--ink)", strokeWidth: 2, fill: "none", inset: 0 })],
    });
    return { node, rows: table };
  })();
}
