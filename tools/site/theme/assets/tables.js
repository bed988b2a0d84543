// Filters and sorts the tables of methods.
const tables = [...document.querySelectorAll(".methods table")];
const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
const count = document.getElementById("count");
const filter = document.getElementById("filter");

function show() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const section = row.closest(".methods");
    const text = `${row.textContent} ${section.dataset.side}`.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  for (const table of tables) {
    const box = table.closest(".methods");
    box.hidden = [...table.tBodies[0].rows].every((row) => row.hidden);
    const text = box.previousElementSibling; // below the heading of the group
    text.hidden = text.previousElementSibling.hidden = box.hidden;
  }
  count.textContent = words.length ? `${shown} of ${rows.length}` : "";
}

function sort(table, column, button) {
  const body = table.tBodies[0];
  const down = button.parentElement.getAttribute("aria-sort") === "ascending";
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  button.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
  const sorted = [...body.rows].sort((a, b) =>
    a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true }),
  );
  body.append(...(down ? sorted.reverse() : sorted));
}

for (const table of tables) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => sort(table, column, button));
  });
}
filter.addEventListener("input", show);
show();
