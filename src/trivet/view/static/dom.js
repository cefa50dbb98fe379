// Makes elements. Text is only ever set as text: what models wrote is never parsed as HTML, here or anywhere in this page.

/** An element: `h("p", { class: "x", onclick: f }, "text", child)`. Properties that are null or false are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Puts `children` in place of what `element` held. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A table from rows of cells; a cell is text, a number or an element. */
export function table(head, rows, properties = {}) {
  return h("table", properties,
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))));
}

/** What stands where nothing is yet: what is awaited, and from whom. */
export function empty(title, ...rest) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...rest.map((text) => h("p", {}, text)));
}
