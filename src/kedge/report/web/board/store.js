// What the page knows: the runs as the server tells them, and what the user has chosen. Elements,
// numbers as text and curves are in shared.js, which a report has, too.

export const $ = (id) => document.getElementById(id);

export function later(wait, action) {
  let timer = null;
  const call = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => { timer = null; action(...given); }, wait);
  };
  call.cancel = () => { clearTimeout(timer); timer = null; };
  call.isWaiting = () => timer !== null;
  return call;
}

const key = document.querySelector("meta[name=kedge-key]").content;

export const store = {
  title: "",
  rows: new Map(),
  selection: [],
  filter: { text: "", method: "", data: "", tag: "", states: new Set() },
  sort: { by: "started", down: true },
  offset: 0, // seconds that the server's clock is ahead
  connected: false,
  loaded: false,
};

const listeners = [];
export const onChange = (listener) => listeners.push(listener);
export function tell(what, ids = null) {
  for (const listener of listeners) listener(what, ids);
}

export const now = () => Date.now() / 1000 + store.offset;

export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  return read(answer);
}

export async function send(path, body = {}) {
  const headers = { "Content-Type": "application/json", "X-Kedge-Key": key };
  return read(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function read(answer) {
  const found = await answer.json().catch(() => ({ error: `the board answered ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error || `the board answered ${answer.status}`);
  return found;
}

export function put(rows, gone = []) {
  for (const row of rows) {
    const old = store.rows.get(row.id);
    if (row.spark === null && old?.spark) row.spark = old.spark;
    store.rows.set(row.id, row);
  }
  for (const id of gone) store.rows.delete(id);
  tell("rows", new Set([...rows.map((row) => row.id), ...gone]));
}

export function connect() {
  const source = new EventSource("/events");
  source.addEventListener("all", (event) => {
    const data = JSON.parse(event.data);
    store.title = data.title;
    store.cut = data.cut;
    store.offset = data.now - Date.now() / 1000;
    store.connected = store.loaded = true;
    const known = new Set(data.rows.map((row) => row.id));
    tell("connection");
    put(data.rows, [...store.rows.keys()].filter((id) => !known.has(id)));
  });
  source.addEventListener("change", (event) => {
    const data = JSON.parse(event.data);
    store.offset = data.now - Date.now() / 1000;
    put(data.rows, data.gone);
  });
  source.addEventListener("error", () => {
    store.connected = false;
    tell("connection");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  });
  source.addEventListener("open", () => {
    store.connected = true;
    tell("connection");
  });
}

// The selection is part of the address, so that "back" works and a page can be kept.
export function select(ids) {
  const wanted = [...new Set(ids)];
  const hash = wanted.length ? "#" + wanted.join(",") : "#";
  if (location.hash.slice(1) === hash.slice(1)) return;
  history.pushState(null, "", hash === "#" ? location.pathname : hash);
  readSelection();
}

export function toggle(id) {
  const has = store.selection.includes(id);
  select(has ? store.selection.filter((other) => other !== id) : [...store.selection, id]);
}

export function readSelection() {
  store.selection = location.hash.slice(1).split(",").filter((id) => /^[0-9a-f]{16}$/.test(id));
  tell("selection");
}
