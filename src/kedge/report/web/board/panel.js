// The panel beside the list: one run in detail, or several compared.

import { draw, load } from "./curves.js";
import { drawNotes } from "./notes.js";
import { drawSettings, drawTable } from "./table.js";
import { $, ask, later, now, onChange, put, select, send, store, toggle } from "./store.js";
import { ago, clock, duration, headline, isLive, progress, STATES, story } from "./words.js";

const options = { column: "", x: "round", log: false, seeds: true };
const hidden = new Set();
let detail = null; // of the selected run
let table = null; // of the selected runs
let shown = ""; // the selection that is drawn
let busy = false, again = false;

export function watchPanel() {
  onChange((what, ids) => {
    if (what === "selection") drawPanel();
    if (what === "rows" && store.selection.some((id) => ids.has(id))) update();
  });
  new ResizeObserver(later(120, () => drawChart(true))).observe($("panel"));
  setInterval(() => { if (store.selection.length === 1) drawState(); }, 1000);
}

const rows = () => store.selection.map((id) => store.rows.get(id)).filter(Boolean);

export function drawPanel() {
  const found = rows();
  const panel = $("panel");
  const is = found.length > 0;
  panel.hidden = !is;
  $("main").classList.toggle("split", is);
  const key = found.map((row) => row.id).join();
  if (!is) { shown = ""; fill(panel); return; }
  if (key === shown) { update(); return; }
  shown = key;
  detail = table = null;
  options.column = new Set(found.map((row) => row.column)).size === 1 ? found[0].column : found[0].metric;
  hidden.clear();
  fill(panel, found.length === 1 ? single(found[0]) : several(found));
  panel.scrollTop = 0;
  update();
  if (matchMedia("(max-width: 1000px)").matches) panel.querySelector("h2").focus();
}

const close = () => el("button", { type: "button", class: "close", "aria-label": "Close", click: () => select([]) }, "✕");

function single(row) {
  return [
    el("div", { class: "head" }, el("h2", { tabindex: "-1" }, row.name), close()),
    el("div", { id: "story" }),
    el("div", { id: "actions", class: "actions" }),
    chartBox(),
    el("div", { id: "notes" }),
    el("div", { id: "commands" }),
    el("details", { id: "settings" }, el("summary", {}, "Settings"), el("table", { class: "plain" })),
  ];
}

function several(found) {
  return [
    el("div", { class: "head" }, el("h2", { tabindex: "-1" }, `${found.length} runs compared`), close()),
    el("div", { class: "actions" }, reportLink(found)),
    chartBox(),
    el("div", { id: "legend", class: "legend" }),
    el("div", { id: "table" }),
    el("div", { id: "differences" }),
  ];
}

const reportLink = (found) =>
  el("a", { class: "button", href: "/report?ids=" + found.map((row) => row.id).join(","), target: "_blank", rel: "noopener" }, "Open report");

function chartBox() {
  const set = (name, value) => { options[name] = value; update(true); };
  const choice = (name, label, all) => el("label", {}, label, " ", el("select", { id: "chart-" + name, change: (event) => set(name, event.target.value) },
    all.map(([value, text]) => el("option", { value, selected: options[name] === value }, text))));
  const box = (name, label) => el("label", {}, el("input", { type: "checkbox", id: "chart-" + name, checked: options[name], change: (event) => set(name, event.target.checked) }), " ", label);
  return [
    el("div", { class: "controls" }, choice("column", "Show", [[options.column, options.column || "…"]]),
      choice("x", "over", [["round", "rounds"], ["mb", "MB"], ["s", "seconds"]]), box("log", "log"), box("seeds", "seeds")),
    el("div", { id: "chart", class: "chart plot" }),
  ];
}

// Ask for what is new, and draw it; requests do not pile up.
async function update(force = false) {
  if (busy) { again = true; return; }
  busy = true;
  const found = rows(), key = shown;
  try {
    drawState();
    options.column = options.column || found[0]?.column || "";
    const column = options.column;
    if (column) await Promise.all(found.map((row) => load(row.id, column)));
    if (found.length === 1 && (!detail || detail.row.state !== found[0].state || !detail.columns.length)) detail = await ask(`/run/${found[0].id}`);
    if (found.length > 1) {
      table = await ask("/table?ids=" + found.map((row) => row.id).join(","));
      if (!detail) detail = await ask(`/run/${found[0].id}`);
    }
    if (key === shown) drawAll(force);
  } catch (error) {
    if (key === shown && found.length) $("chart").replaceChildren(el("p", { class: "none" }, error.message));
  } finally {
    busy = false;
    if (again) { again = false; setTimeout(update, 300); }
  }
}

function drawAll(force) {
  drawColumns();
  drawState();
  drawChart(force);
  const found = rows();
  if (found.length === 1 && detail) {
    drawCommands();
    drawNotes($("notes"), found[0]);
    const body = $("settings").querySelector("table");
    fill(body, Object.entries(detail.settings).map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, value))));
  }
  if (found.length > 1 && table) {
    drawLegend();
    drawTable($("table"), runs(), table);
    drawSettings($("differences"), runs(), table.settings);
  }
}

function drawColumns() {
  const select = $("chart-column");
  const all = (detail?.columns || []).filter((name) => !["round", "imbalanced", "stopped", "diverged"].includes(name) || name === options.column);
  const known = [...new Set([options.column, ...all])].filter(Boolean);
  if (select.dataset.drawn === known.join()) return;
  select.dataset.drawn = known.join();
  fill(select, known.map((name) => el("option", { value: name, selected: name === options.column }, name)));
}

// Labels of runs: the method if it tells them apart, otherwise the folder.
function runs() {
  const found = rows();
  const methods = found.map((row) => row.method);
  const differ = new Set(methods).size === methods.length;
  return found.map((row, i) => ({ row, ...styled(i), hidden: hidden.has(row.id), name: differ ? row.method : row.name }));
}

let drawnAt = 0;
function drawChart(force = false) {
  const element = $("chart");
  if (!element) return;
  // A chart that is being read stays for a while.
  if (!force && element.matches(":hover") && Date.now() - drawnAt < 4000) { redraw(); return; }
  drawnAt = Date.now();
  draw(element, runs(), options);
}
const redraw = later(1500, drawChart);

function drawState() {
  const [row] = rows();
  const element = $("story");
  if (!row || !element) return;
  const { share, text } = progress(row);
  const quiet = now() - row.updated;
  const facts = [`${row.method} on ${row.data}`, `round ${text}`];
  if (isLive(row) && row.eta !== null) facts.push(`ETA ${clock(row.eta - quiet)}`);
  if (!isLive(row) && row.seconds) facts.push(`took ${duration(row.seconds)}`);
  if (row.started) facts.push(`started ${ago(now() - row.started)}`);
  const content = JSON.stringify([row.state, row.reason, facts, headline(row)]);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  fill(element,
    el("p", { class: "line" }, el("span", { class: `state ${row.state}` }, STATES[row.state].word), " ", story(row)),
    el("span", { class: "bar wide", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Rounds" }, el("i", { style: `width:${100 * share}%` })),
    el("p", { class: "facts" }, facts.join(" · ")),
    row.last ? el("p", { class: "result" }, el("b", {}, headline(row)), ` ${row.label}`, row.last.n > 1 ? `, mean ± sd of ${row.last.n} seeds` : "") : null);
  drawActions(row);
}

function drawActions(row) {
  const element = $("actions");
  if (element.dataset.drawn === row.state) return;
  element.dataset.drawn = row.state;
  const stop = el("button", { type: "button", id: "stop", class: "danger", click: () => askStop(row, stop) }, "Stop");
  fill(element, row.state === "training" || row.state === "starting" ? stop : null,
    row.state === "stopping" ? el("button", { type: "button", disabled: true }, "Stopping …") : null, reportLink([row]));
}

async function askStop(row, button) {
  if (!button.dataset.sure) {
    button.dataset.sure = "yes";
    button.textContent = "Stop after this round?";
    setTimeout(() => { delete button.dataset.sure; button.textContent = "Stop"; }, 5000);
    return;
  }
  button.disabled = true;
  try {
    put([(await send(`/run/${row.id}/stop`)).row]);
  } catch (error) {
    button.textContent = error.message;
  }
}

function drawCommands() {
  const element = $("commands");
  const content = JSON.stringify(detail.commands);
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  const titles = { resume: "Resume it", repeat: "Repeat it" };
  fill(element, ["resume", "repeat"].filter((name) => detail.commands[name]).map((name) => {
    const text = detail.commands[name];
    const button = el("button", { type: "button", "data-copy": name, click: () => copy(text, button) }, "copy");
    return el("div", { class: "command" }, el("span", {}, titles[name]), el("code", {}, text), button);
  }));
}

function drawLegend() {
  const element = $("legend");
  const content = JSON.stringify(runs().map((run) => [run.row.id, run.name, run.hidden, headline(run.row), run.row.state]));
  if (element.dataset.drawn === content) return;
  element.dataset.drawn = content;
  fill(element, runs().map((run) => el("span", { class: "entry" },
    el("button", { type: "button", "aria-pressed": String(!run.hidden), title: "Switch this curve on or off", click: () => {
      if (!hidden.delete(run.row.id)) hidden.add(run.row.id);
      drawLegend();
      drawChart(true);
    } }, swatch(run), run.name),
    el("button", { type: "button", class: "drop", "aria-label": `Leave out ${run.name}`, click: () => toggle(run.row.id) }, "✕"))));
}
