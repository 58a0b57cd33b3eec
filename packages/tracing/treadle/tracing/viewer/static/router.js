/** The address says what is shown: `#/VIEW?name=value`. Links and the back button work by it. */

import { oneFile } from "./one_file.js";

/** @returns {{view: string, params: Record<string, string>}} */
export function place() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || (oneFile ? "overview" : "curves"), params: Object.fromEntries(new URLSearchParams(query)) };
}

/**
 * @param {string} view
 * @param {Record<string, string | number | null | undefined>} [params] Empty ones are left out.
 */
export function link(view, params = {}) {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const query = new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** @param {string} view @param {Record<string, any>} [params] */
export function go(view, params) {
  location.hash = link(view, params);
}

/**
 * Changes parameters of this view without drawing it anew.
 * @param {Record<string, any>} changes
 */
export function note(changes) {
  const { view, params } = place();
  history.replaceState(null, "", link(view, { ...params, ...changes }));
}
