// Tags and a note of a run, saved as they are written.

import { later, put, send } from "./store.js";

let drawn = { id: "", tags: null };
let writing = 0; // what is on its way; until it is there, the page is newer than the server's row

export function drawNotes(element, row) {
  const tags = JSON.stringify(row.tags);
  if (drawn.id === row.id && element.firstChild) {
    if (drawn.tags !== tags && !writing) { drawn.tags = tags; drawTags(element.querySelector(".tags"), row); }
    const area = element.querySelector("textarea");
    if (document.activeElement !== area && !save.isWaiting()) area.value = row.note;
    return;
  }
  save.cancel();
  drawn = { id: row.id, tags };
  const list = el("div", { class: "tags" });
  const area = el("textarea", { id: "note", rows: 2, maxlength: 20000, placeholder: "A note about this run …", "aria-label": "Note", input: () => save(row.id, state()), value: row.note });
  const state = () => ({ tags: [...list.querySelectorAll("[data-tag]")].map((one) => one.dataset.tag), note: area.value });
  const input = el("input", { id: "new-tag", placeholder: "add a tag", maxlength: 40, "aria-label": "Add a tag", autocomplete: "off" });
  const form = el("form", { submit: (event) => {
    event.preventDefault();
    const now = state();
    if (!input.value.trim()) return;
    write(row.id, { ...now, tags: [...new Set([...now.tags, input.value.trim()])] });
    input.value = "";
  } }, input);
  fill(element, el("div", { class: "tagline" }, list, form), area, el("span", { class: "saved", role: "status" }));
  drawTags(list, row);
}

function drawTags(list, row) {
  fill(list, row.tags.map((tag) => el("span", { class: "tag", "data-tag": tag }, tag,
    el("button", { type: "button", "aria-label": `Remove the tag ${tag}`, click: () =>
      write(row.id, { tags: row.tags.filter((other) => other !== tag), note: document.getElementById("note").value }) }, "✕"))));
}

const save = later(600, write);

async function write(id, notes) {
  save.cancel();
  const status = document.querySelector("#notes .saved"), list = document.querySelector("#notes .tags");
  writing += 1;
  if (list && drawn.id === id) { drawn.tags = JSON.stringify(notes.tags); drawTags(list, { id, tags: notes.tags }); }
  try {
    const { row } = await send(`/run/${id}/notes`, notes);
    writing -= 1;
    put([row]);
    if (status) status.textContent = "saved";
    setTimeout(() => { if (status) status.textContent = ""; }, 1500);
  } catch (error) {
    writing -= 1;
    drawn.tags = null;
    if (status) status.textContent = error.message;
  }
}
