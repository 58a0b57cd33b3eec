/** What changed between two texts, by words. */

/**
 * @param {string} before
 * @param {string} after
 * @returns {{kind: "same" | "removed" | "added", text: string}[]} In the order of reading.
 */
export function differences(before, after) {
  const a = before.match(/\s+|[^\s]+/g) ?? [];
  const b = after.match(/\s+|[^\s]+/g) ?? [];
  // longest[i][j]: length of the longest common subsequence of a from i and b from j.
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i][j] =
        a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  /** @type {{kind: "same" | "removed" | "added", text: string}[]} */
  const found = [];
  /** @param {"same" | "removed" | "added"} kind @param {string} text */
  const add = (kind, text) => {
    const last = found.at(-1);
    if (last?.kind === kind) last.text += text;
    else found.push({ kind, text });
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) [i, j] = (add("same", a[i]), [i + 1, j + 1]);
    else if (j >= b.length || (i < a.length && longest[i + 1][j] >= longest[i][j + 1]))
      add("removed", a[i++]);
    else add("added", b[j++]);
  }
  return found;
}
