/**
 * Makes elements. Invariant: every string becomes a text node or an attribute, never markup, and
 * characters that act instead of showing are made visible. So no text that a model wrote can do
 * anything, wherever it is shown.
 */

// Controls (tab and line feed excepted), bidirectional controls, what has no width, and tags, in
// which text can hide.
const ACTING =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\u{e0000}-\u{e007f}]/gu;

/**
 * Returns text in which acting characters are replaced by what names them.
 * @param {unknown} value
 * @returns {string}
 */
export function visible(value) {
  return String(value).replace(ACTING, (letter) => {
    const code = letter.codePointAt(0) ?? 0;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 * @param {string} tag Element name, with classes after dots: "p.note"; of SVG: "svg:path".
 * @param {Record<string, any> | null} [props] Attributes; `on…` is a listener, `style` an object.
 * @param {...(Child | Child[] | Child[][])} children
 * @returns {any} The element.
 */
export function el(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  /** @type {any} */
  const node = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (key === "value" || key === "checked" || key === "disabled") node[key] = value;
    else node.setAttribute(key, visible(value));
  }
  append(node, children);
  return node;
}

/**
 * @param {Node} node
 * @param {(Child | Child[] | Child[][])[]} children
 */
export function append(node, children) {
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.appendChild(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

/**
 * Replaces what a node holds.
 * @param {Element} node
 * @param {...(Child | Child[] | Child[][])} children
 */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

/**
 * A select whose options are given as [value, label].
 * @param {[string, string, boolean?][]} options The third: it is there and cannot be chosen.
 * @param {string} chosen
 * @param {(value: string) => void} change
 * @param {Record<string, any>} [props]
 */
export function select(options, chosen, change, props = {}) {
  const node = el(
    "select",
    { ...props, onchange: (event) => change(event.target.value) },
    options.map(([value, label, disabled]) =>
      el("option", { value, disabled, selected: value === chosen ? "" : null }, label),
    ),
  );
  return node;
}

/**
 * Shown where there is nothing: what is missing, and why.
 * @param {string} title
 * @param {...Child} text
 */
export function empty(title, ...text) {
  return el("div.empty", null, el("h2", null, title), el("p", null, ...text));
}

/**
 * Resolves a colour of the style sheet to what a canvas takes.
 * @param {string} name Of a custom property, without dashes.
 */
export function colour(name) {
  const probe = el("span", { style: { color: `var(--${name})`, display: "none" } });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
