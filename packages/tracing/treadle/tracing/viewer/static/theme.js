/** Light and dark: as the system has it, until the reader chooses. */

const KEY = "treadle-theme";
/** @type {Set<() => void>} */
const listeners = new Set();

/** What the reader chose; null also where the browser keeps nothing, as in a sandbox. */
function choice() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function apply() {
  const chosen = choice();
  document.documentElement.style.colorScheme = chosen ?? "light dark";
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  const button = document.getElementById("theme");
  if (button) button.textContent = isDark() ? "☀" : "☾";
  for (const changed of listeners) changed();
}

export function isDark() {
  const chosen = choice();
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function toggleTheme() {
  localStorage.setItem(KEY, isDark() ? "light" : "dark");
  apply();
}

/**
 * Calls when the colours change, until the returned function is called.
 * @param {() => void} changed
 */
export function onTheme(changed) {
  listeners.add(changed);
  return () => listeners.delete(changed);
}

export function startTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.getElementById("theme")?.addEventListener("click", toggleTheme);
  apply();
}
