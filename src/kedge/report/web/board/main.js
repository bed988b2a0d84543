// Start: drop the token from the address, draw the page, listen to the server.

import { watchPanel } from "./panel.js";
import { startList } from "./list.js";
import { $, connect, onChange, readSelection, select, store } from "./store.js";

if (location.search) history.replaceState(null, "", location.pathname + location.hash);

function drawConnection() {
  const state = store.connected ? "live" : store.loaded ? "connection lost" : "connecting";
  $("connection").textContent = state;
  $("connection").className = store.connected ? "on" : "off";
  $("folder").textContent = store.title + (store.cut ? " (too many folders: not all are searched)" : "");
  document.title = store.title ? `${store.title} · kedge board` : "kedge board";
}

onChange((what) => {
  if (what === "connection") drawConnection();
});
startList();
watchPanel();
window.addEventListener("popstate", readSelection);
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=checkbox]), textarea");
  if (event.key === "Escape" && store.selection.length && !typing) select([]);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("search").focus();
  }
});
readSelection();
connect();
