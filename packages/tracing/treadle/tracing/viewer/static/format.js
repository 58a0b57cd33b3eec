/** Numbers as people read them. A missing number is a dash, never zero. */

const DASH = "–";
const MINUS = "\u2212";

/** @param {number} value @param {number} digits */
function plain(value, digits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits }).replace("-", MINUS);
}

/**
 * A number with about four significant digits.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1000 || Number.isInteger(value)) return plain(value, size >= 1e5 ? 0 : 1);
  if (size < 1e-3 && size > 0)
    return value.toExponential(2).replace("-", MINUS).replace("e-", `e${MINUS}`);
  return plain(value, size >= 100 ? 1 : size >= 10 ? 2 : 4 - (size >= 1 ? 1 : 0));
}

/** @param {number | null | undefined} value */
export function signed(value) {
  return value !== null && value !== undefined && value > 0 ? `+${number(value)}` : number(value);
}

/** @param {number | null | undefined} value */
export function count(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en-US");
}

/** @param {number} value From 0 to 1. */
export function percent(value) {
  if (!Number.isFinite(value)) return DASH;
  return `${(value * 100).toFixed(value >= 5e-4 && value < 0.1 ? 1 : 0)} %`;
}

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

/** @param {number} n @param {string} noun */
export function plural(n, noun) {
  return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}
