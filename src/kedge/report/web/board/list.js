// The list of runs: filter, sort, select. Rows are updated in place.

import { $, ask, later, now, onChange, put, select, store, tell, toggle } from "./store.js";
import { ago, clock, headline, isLive, progress, STATES } from "./words.js";

const MAX_ROWS = 500; // drawn at once; a filter finds the others
const HEADS = [
  { by: "name", text: "Run" },
  { by: "state", text: "State" },
  { by: "method", text: "Method" },
  { by: "data", text: "Data" },
  { by: "progress", text: "Rounds" },
  { by: "last", text: "Result", down: true },
  { by: "", text: "Curve" },
  { by: "started", text: "Started", down: true },
];
const keys = {
  name: (row) => row.name.toLowerCase(),
  state: (row) => STATES[row.state].rank + row.state,
  method: (row) => row.method.toLowerCase(),
  data: (row) => row.data.toLowerCase(),
  progress: (row) => progress(row).share,
  last: (row) => (row.last ? row.last.mean : null),
  started: (row) => row.started,
};
const drawn = new Map(); // id -> {tr, text}

export function startList() {
  const { filter, sort } = store;
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  const typed = later(80, () => { filter.text = $("search").value; tell("filter"); });
  $("search").addEventListener("input", typed);
  for (const name of ["method", "data", "tag"]) {
    $(name).addEventListener("change", () => { filter[name] = $(name).value; tell("filter"); });
  }
  for (const head of HEADS.filter((one) => one.by)) $("sort").append(el("option", { value: head.by }, "by " + head.text.toLowerCase()));
  $("sort").value = sort.by;
  $("sort").addEventListener("change", () => sortBy($("sort").value));
  drawHeads();
  const draw = later(30, drawRows);
  onChange((what) => {
    if (what === "rows") drawFilters();
    if (what === "rows" || what === "filter") draw();
    if (what === "selection") markSelection();
  });
  setInterval(tick, 1000);
}

function sortBy(by) {
  const { sort } = store;
  const first = Boolean(HEADS.find((head) => head.by === by).down);
  sort.down = sort.by === by ? !sort.down : first;
  sort.by = by;
  $("sort").value = by;
  drawHeads();
  tell("filter");
}

function drawHeads() {
  const { sort } = store;
  const cells = HEADS.map((head) => {
    if (!head.by) return el("th", { scope: "col", class: "curve" }, head.text);
    const is = head.by === sort.by;
    const direction = is ? (sort.down ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", class: head.by === "state" ? "status" : head.by, "aria-sort": direction },
      el("button", { type: "button", click: () => sortBy(head.by) },
        head.text, el("span", { "aria-hidden": "true" }, is ? (sort.down ? " ↓" : " ↑") : "")));
  });
  fill($("heads"), el("th", { scope: "col", class: "pick" }, el("span", { class: "unseen" }, "Compare")), cells);
}

function options(element, all, chosen, title) {
  const text = JSON.stringify([all, chosen]);
  if (element.dataset.drawn === text) return;
  element.dataset.drawn = text;
  fill(element, el("option", { value: "" }, title), all.map((name) => el("option", { value: name }, name)));
  element.value = all.includes(chosen) ? chosen : "";
  element.hidden = all.length < 2 && !chosen;
}

function drawFilters() {
  const rows = [...store.rows.values()];
  const distinct = (values) => [...new Set(values)].sort((a, b) => a.localeCompare(b));
  options($("method"), distinct(rows.map((row) => row.method)), store.filter.method, "all methods");
  options($("data"), distinct(rows.map((row) => row.data)), store.filter.data, "all data");
  options($("tag"), distinct(rows.flatMap((row) => row.tags)), store.filter.tag, "all tags");
  $("tag").hidden = !rows.some((row) => row.tags.length);
  const counts = new Map();
  for (const row of rows) counts.set(row.state, (counts.get(row.state) || 0) + 1);
  const wanted = store.filter.states;
  const text = JSON.stringify([[...counts].sort(), [...wanted]]);
  if ($("states").dataset.drawn === text) return;
  $("states").dataset.drawn = text;
  const focused = document.activeElement?.dataset?.state;
  fill($("states"), Object.keys(STATES).filter((name) => counts.has(name) || wanted.has(name)).map((name) =>
    el("button", {
      type: "button", class: `state ${name}`, "data-state": name, "aria-pressed": String(wanted.has(name)),
      click: () => {
        if (!wanted.delete(name)) wanted.add(name);
        drawFilters();
        tell("filter");
      },
    }, `${STATES[name].word} ${counts.get(name) || 0}`)));
  if (focused) $("states").querySelector(`[data-state=${focused}]`)?.focus();
}

function chosen() {
  const { filter, sort } = store;
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...store.rows.values()].filter((row) => {
    if (filter.method && row.method !== filter.method) return false;
    if (filter.data && row.data !== filter.data) return false;
    if (filter.tag && !row.tags.includes(filter.tag)) return false;
    if (filter.states.size && !filter.states.has(row.state)) return false;
    const text = [row.name, row.method, row.data, row.state, row.note, ...row.tags].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const key = keys[sort.by], sign = sort.down ? -1 : 1;
  return rows.sort((a, b) => {
    if (sort.by === "started" && isLive(a) !== isLive(b)) return isLive(a) ? -1 : 1;
    const [x, y] = [key(a), key(b)];
    if (x === y) return a.name.localeCompare(b.name, undefined, { numeric: true });
    if (x === null || y === null) return x === null ? 1 : -1;
    return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
  });
}

function drawRows() {
  const rows = chosen();
  const shown = rows.slice(0, MAX_ROWS);
  const body = $("rows");
  const wanted = shown.map(drawRow);
  const focused = document.activeElement;
  const same = body.children.length === wanted.length && wanted.every((tr, i) => body.children[i] === tr);
  if (!same) {
    body.replaceChildren(...wanted);
    if (focused && body.contains(focused)) focused.focus({ preventScroll: true });
  }
  for (const id of drawn.keys()) if (!store.rows.has(id)) drawn.delete(id);
  const none = store.rows.size === 0
    ? `No runs in ${store.title} yet. Start one: kedge run --out ${store.title}/first`
    : rows.length === 0 ? "No run matches the filter." : "";
  const more = rows.length > shown.length ? `${rows.length - shown.length} more; filter to see them.` : "";
  $("empty").textContent = none || more;
  $("empty").hidden = !(none || more) || !store.loaded;
  $("runs").hidden = rows.length === 0;
  markSelection();
}

function drawRow(row) {
  const { share, text } = progress(row);
  const old = drawn.get(row.id);
  const content = JSON.stringify([row, store.title]);
  if (old && old.content === content) return old.tr;
  const tr = old ? old.tr : newRow(row.id);
  const cells = tr.cells;
  const slash = row.name.lastIndexOf("/") + 1;
  fill(cells[1].firstChild, slash ? el("span", { class: "parent" }, row.name.slice(0, slash)) : "", row.name.slice(slash));
  fill(cells[1].lastChild, row.tags.map((tag) => el("span", { class: "tag" }, tag)), row.note ? el("span", { class: "note", title: row.note }, "✎ ", row.note.slice(0, 60)) : "");
  fill(cells[2], el("span", { class: `state ${row.state}` }, STATES[row.state].word));
  tr.className = `${isLive(row) ? "live" : row.state} ${tr.classList.contains("chosen") ? "chosen" : ""}`;
  fill(cells[3], row.method);
  fill(cells[4], row.data);
  fill(cells[5], el("span", { class: "bar", "aria-hidden": "true" }, el("i", { style: `width:${(100 * share).toFixed(1)}%` })),
    el("span", { class: "rounds" }, text), el("span", { class: "eta" }));
  fill(cells[6], el("span", { class: "value" }, headline(row)), row.metric ? el("span", { class: "metric" }, row.label, row.last && row.last.n > 1 ? `, n\u00a0=\u00a0${row.last.n}` : "") : "");
  cells[6].title = row.metric ? `${row.column} after the last test, mean ± sd over ${row.last?.n ?? 0} seeds` : "";
  if (row.spark) drawSpark(cells[7], row);
  cells[8].dataset.at = row.started;
  drawn.set(row.id, { tr, content });
  tickRow(row, tr);
  return tr;
}

function newRow(id) {
  const tr = el("tr", { "data-id": id, click: (event) => {
    if (!event.target.closest("input, label, a")) select([id]);
  } },
  el("td", { class: "pick" }, el("label", {}, el("input", { type: "checkbox", "aria-label": "Compare this run", change: () => toggle(id) }))),
  el("td", { class: "name" }, el("a", { href: "#" + id, click: (event) => { event.preventDefault(); select([id]); } }), el("span", { class: "tags" })),
  ["status", "method", "data", "progress", "last", "curve", "started"].map((name) => el("td", { class: name })));
  seen.observe(tr);
  return tr;
}

function drawSpark(cell, row) {
  const values = row.spark;
  if (values.length < 2) { fill(cell); return; }
  const [width, height] = [96, 26];
  const x = d3.scaleLinear([0, values.length - 1], [2, width - 3]);
  let [low, high] = d3.extent(values);
  if (low === high) [low, high] = [low - 1, high + 1];
  const y = d3.scaleLinear([low, high], [height - 3, 3]);
  const svg = d3.create("svg").attr("width", width).attr("height", height).attr("role", "img")
    .attr("aria-label", `${row.metric} from ${values[0]} to ${values.at(-1)}`);
  svg.append("path").attr("d", d3.line((_, i) => x(i), (v) => y(v))(values));
  svg.append("circle").attr("cx", x(values.length - 1)).attr("cy", y(values.at(-1))).attr("r", 2.2);
  cell.replaceChildren(svg.node());
}

// Small curves of runs at rest are asked for when their rows come into view.
const waiting = new Set();
const askSparks = later(60, async () => {
  const ids = [...waiting].slice(0, 40);
  ids.forEach((id) => waiting.delete(id));
  if (!ids.length) return;
  try {
    const found = await ask("/sparks?ids=" + ids.join(","));
    put(Object.entries(found).filter(([id]) => store.rows.has(id)).map(([id, spark]) => ({ ...store.rows.get(id), spark })));
  } catch { /* the connection shows it */ }
  if (waiting.size) askSparks();
});
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const row = store.rows.get(entry.target.dataset.id);
    if (entry.isIntersecting && row && row.spark === null) waiting.add(row.id);
  }
  if (waiting.size) askSparks();
}, { rootMargin: "100px" });

function tick() {
  for (const [id, { tr }] of drawn) if (store.rows.has(id)) tickRow(store.rows.get(id), tr);
}

function tickRow(row, tr) {
  const eta = tr.cells[5].lastChild, quiet = now() - row.updated;
  let text = "";
  if (isLive(row) && row.eta !== null) text = `ETA ${clock(row.eta - quiet)}`;
  if (isLive(row) && quiet > Math.max(60, 5 * (row.eta || 0) / row.rounds)) text = `last round ${ago(quiet)}`;
  if (eta.textContent !== text) eta.textContent = text;
  const when = row.started ? ago(now() - row.started) : "";
  if (tr.cells[8].textContent !== when) {
    tr.cells[8].textContent = when;
    tr.cells[8].title = new Date(row.started * 1000).toLocaleString();
  }
}

function markSelection() {
  for (const [id, { tr }] of drawn) {
    const is = store.selection.includes(id);
    tr.classList.toggle("chosen", is);
    tr.cells[0].querySelector("input").checked = is;
  }
}
