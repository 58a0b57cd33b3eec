/** Requests data from the server of the page, or from the page where it is a single file. */

import { answer, oneFile } from "./one_file.js";

/**
 * @param {string} path Below /api.
 * @param {Record<string, string | number>} [params]
 * @returns {Promise<any>}
 * @throws {Error} The server refused, and the message says why; or it has ended.
 */
export async function get(path, params = {}) {
  if (oneFile) return answer(path, params);
  const query = new URLSearchParams(Object.entries(params).map(([k, v]) => [k, String(v)]));
  let response;
  try {
    response = await fetch(`/api/${path}?${query}`);
  } catch {
    throw new Error("the viewer does not answer: it was ended, or this machine sleeps");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `the viewer answered ${response.status}`);
  return body;
}
