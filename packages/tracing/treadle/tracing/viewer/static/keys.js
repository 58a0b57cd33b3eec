/** The keyboard: one table of keys for every view, and the dialog that lists it. */

import { el, fill } from "./dom.js";

/**
 * @typedef {{key: string, does: string, run: () => void}} Key
 */

/** @type {Key[]} */
let ofView = [];
/** @type {Key[]} */
let always = [];

/** @param {Key[]} keys Of the view that is shown. */
export function setViewKeys(keys) {
  ofView = keys;
}

export function showKeys() {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("keys"));
  const row = (/** @type {Key} */ { key, does }) =>
    el("tr", null, el("td", null, el("kbd", null, NAMES[key] ?? key)), el("td", null, does));
  fill(
    dialog,
    el("h2", null, "Keys"),
    el("table", null, [...ofView, ...always].map(row)),
    el("form", { method: "dialog" }, el("button", { autofocus: "" }, "Close")),
  );
  dialog.showModal();
}

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };

/** @param {Key[]} keys That work in every view. */
export function startKeys(keys) {
  always = keys;
  document.getElementById("help")?.addEventListener("click", showKeys);
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") target.blur();
    if (target.matches("input, select, textarea")) return;
    const found = [...ofView, ...always].find(({ key }) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}
