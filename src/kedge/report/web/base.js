// What all charts of a page share: switches, drawing at the present width, saving, sorting, theme.
const DATA = JSON.parse(document.getElementById("data").textContent);
/** Numbers of one chart with the same decimals: as many as their size calls for. */
function alike(values) {
  if (values.every(Number.isInteger)) return (v) => d3.format(",")(v).replace("-", "−");
  const most = d3.max(values, Math.abs) || 1;
  const places = Math.max(0, Math.min(4, 2 - Math.floor(Math.log10(most) + 0.15)));
  return (v) => fixed(v, Math.min(places, most >= 10 ? 1 : 2));
}

/** Space for names beside an axis, and how many characters fit into it. */
function room(names, width) {
  const longest = d3.max(names, (n) => n.length) || 1;
  const pixels = Math.min(Math.max(40, 6.6 * longest + 16), Math.max(90, width * 0.32));
  return { pixels, chars: Math.max(6, Math.floor((pixels - 14) / 6.4)) };
}

/** A scale's domain for values that may all be 0. */
const around = (values) => (values.every((v) => !v) ? { domain: [-1, 1] } : {});

/** A row of buttons of which one is pressed. */
function choice(label, options, chosen, pick) {
  const box = el("span", { class: "switch", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = el("button", { type: "button", "aria-pressed": value === chosen, "data-value": value, click: () => {
      for (const other of box.children) other.setAttribute("aria-pressed", other === button);
      pick(value);
    } }, text);
    box.append(button);
  }
  return box;
}

/** A list to choose from, for what has too many values for buttons. */
function menu(label, options, chosen, pick) {
  const select = el("select", { "aria-label": label, change: (event) => pick(event.target.value) });
  for (const [value, text] of options) select.append(el("option", { value, selected: value === chosen }, text));
  return select;
}

/** Buttons that are switched on and off one by one; `on` is a set that changes. */
function chips(label, items, on, changed) {
  const few = items.length <= 6 && d3.sum(items, (i) => i.text.length) < 60 && !items.some((i) => i.run);
  const box = el("div", { class: `chips${few ? " few" : ""}${items.length > 24 ? " long" : ""}`, role: "group", "aria-label": label });
  const buttons = items.map((item) => {
    const button = el("button", { type: "button", class: "chip", "aria-pressed": on.has(item.key), click: () => {
      if (on.has(item.key)) on.delete(item.key); else on.add(item.key);
      button.setAttribute("aria-pressed", on.has(item.key));
      changed();
    } }, ...(item.run ? [swatch(item.run)] : []), item.text);
    return button;
  });
  box.append(...buttons);
  if (items.length > (items[0].run ? 3 : 8)) {
    const set = (text, all) => el("button", { type: "button", class: "chip plain", click: () => {
      for (const [i, item] of items.entries()) {
        if (all) on.add(item.key); else on.delete(item.key);
        buttons[i].setAttribute("aria-pressed", all);
      }
      changed();
    } }, text);
    box.append(set("all", true), set("none", false));
  }
  return box;
}

/** Draw a figure now and whenever its width changes. `draw(width)` gives {node, rows}. */
function chart(figure, draw) {
  const plot = figure.querySelector(".plot");
  let last = 0, rows = [];
  const again = () => {
    const width = Math.floor(plot.clientWidth);
    if (width < 50) return;
    last = width;
    const drawn = draw(width);
    rows = drawn.rows || [];
    plot.replaceChildren(drawn.node);
    for (const svg of plot.querySelectorAll("svg")) {
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", figure.querySelector("h3, h4").textContent);
    }
  };
  figure.querySelector('[data-save="csv"]')?.addEventListener("click", () => save(figure, "csv", d3.csvFormat(rows), "text/csv"));
  figure.querySelector('[data-save="svg"]')?.addEventListener("click", () => {
    const images = plot.querySelectorAll("svg");
    images.forEach((svg, i) => save(figure, i ? `${i + 1}.svg` : "svg", svgText(svg), "image/svg+xml"));
  });
  new ResizeObserver(() => { if (Math.abs(plot.clientWidth - last) > 1) again(); }).observe(plot);
  return again;
}

/** A chart as a file of its own: colours of the page's theme written out. */
function svgText(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const key of ["fill", "stroke"]) {
      const value = node.getAttribute(key);
      if (value && /var\(|currentColor/i.test(value)) node.setAttribute(key, style[key]);
    }
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("font-family", "Helvetica, Arial, sans-serif");
  copy.setAttribute("color", getComputedStyle(svg).color);
  return new XMLSerializer().serializeToString(copy);
}

function save(figure, suffix, text, type) {
  const heading = figure.querySelector("h3, h4").textContent;
  const name = (document.title.split(" · ")[0] + " " + heading).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 80);
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: `${name}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Tables are sorted by a click on a column: downwards, upwards, as they were. */
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const before = head.getAttribute("aria-sort");
      const next = before === "descending" ? "ascending" : before === "ascending" ? null : "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next) head.setAttribute("aria-sort", next);
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.sort !== undefined ? Number(cell.dataset.sort) : cell.textContent.trim();
      };
      const known = original.filter((row) => key(row) !== ""), rest = original.filter((row) => key(row) === "");
      const sign = next === "descending" ? -1 : 1;
      const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
      const rows = next ? [...known.sort((a, b) => sign * compare(key(a), key(b))), ...rest] : original;
      body.append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button.parentElement.querySelector("code").textContent, button));
}

let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of folded) one.open = false; });
