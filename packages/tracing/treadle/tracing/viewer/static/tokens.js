/**
 * The tokens of a trajectory, coloured by a value of each, with the numbers of the one pointed at.
 * Where the text of single tokens is not known, a span's text has the colour of its mean, and its
 * tokens are chips with their ids below it.
 */

import { el, empty, fill, select } from "./dom.js";
import { number, percent, plural, signed } from "./format.js";
import { MODES, painter } from "./token_colours.js";

/** @typedef {import("./token_colours.js").Token} Token */
/** @typedef {import("./token_colours.js").Paint} Paint */

let lastMode = "logprob";

/** @param {any} sample @returns {Token[]} */
function tokensOf(sample) {
  return sample.spans.flatMap((/** @type {any} */ span) =>
    sample.ids
      .slice(span.start, span.stop)
      .map((/** @type {number} */ id, /** @type {number} */ i) => {
        const at = span.start + i;
        const sampled = span.origin === "sampled";
        const logprob = sampled ? (sample.logprobs[at] ?? null) : null;
        const trained = sample.policy_logprobs?.[at] ?? null;
        return {
          id,
          at,
          span,
          logprob,
          piece: span.pieces?.[i] ?? null,
          entropy: sample.entropy?.[at] ?? null,
          mismatch: logprob === null || trained === null ? null : trained - logprob,
          advantage: sample.advantages?.[at] ?? null,
        };
      }),
  );
}

/**
 * @param {any} found
 * @returns {{node: HTMLElement, move: (by: number) => void}}
 */
export function tokens(found) {
  if (!found.samples.length) {
    return {
      node: empty("No tokens", "The trajectory ended before the model was asked."),
      move: () => {},
    };
  }
  let sampleIndex = found.samples.length - 1;
  /** @type {Token[]} */
  let all = [];
  /** @type {Map<number, HTMLElement[]>} */
  const nodes = new Map();
  let pinned = -1;
  const strip = el("div.strip");
  const legend = el("div.scale");
  const inspector = el("div.inspector", { "aria-live": "polite" });
  const tools = el("div.tools");

  function draw() {
    all = tokensOf(found.samples[sampleIndex]);
    pinned = -1;
    inspect(null);
    const has = (/** @type {string} */ name) =>
      name === "origin" || name === "version" || all.some((t) => MODES[name].of(t) !== null);
    const mode = has(lastMode) ? lastMode : "origin";
    const names = [
      ["origin", "who wrote it"],
      ...Object.entries(MODES).map(([k, m]) => [k, m.label]),
      ["version", "weight version"],
    ];
    fill(
      tools,
      found.samples.length > 1 &&
        select(
          found.samples.map((/** @type {any} */ s, /** @type {number} */ i) => [
            String(i),
            `sample ${i + 1} of ${found.samples.length}, ${plural(s.ids.length, "token")}`,
          ]),
          String(sampleIndex),
          (value) => {
            sampleIndex = Number(value);
            draw();
          },
          { "aria-label": "Sample" },
        ),
      el(
        "label",
        null,
        "Colour by ",
        select(
          names.map(([k, label]) => [k, has(k) ? label : `${label} (not stored)`, !has(k)]),
          mode,
          (value) => {
            lastMode = value;
            draw();
          },
          { "aria-label": "Colour by" },
        ),
      ),
      el("span.grow"),
      legend,
    );
    const paint = painter(mode, all, legend);
    nodes.clear();
    let at = 0;
    fill(
      strip,
      found.samples[sampleIndex].spans.map((/** @type {any} */ span) => {
        const members = all.slice(at, (at += span.stop - span.start));
        return block(span, members, paint);
      }),
    );
  }

  /** @param {any} span @param {Token[]} members @param {Paint} paint */
  function block(span, members, paint) {
    const meta = [
      plural(members.length, "token"),
      span.weight_version !== null && `weights ${span.weight_version}`,
    ]
      .filter(Boolean)
      .join(", ");
    const whole = members.length > 0 && members.every((t) => t.piece !== null);
    return el(
      `section.span.${["sampled", "prompt"].includes(span.origin) ? span.origin : "observed"}`,
      null,
      el("header", null, el("b", null, span.origin), el("span.muted", null, meta)),
      whole
        ? el(
            "div.text",
            null,
            members.map((t) => unit(t, /** @type {string} */ (t.piece), paint)),
          )
        : [
            span.text !== null &&
              el(
                "div.text",
                null,
                el(
                  "span",
                  { style: { background: members.length ? paint.mean(members) : "" } },
                  span.text,
                ),
              ),
            el(
              "details",
              { open: span.text === null ? "" : null },
              el("summary", null, plural(members.length, "token")),
              el(
                "div.chips",
                null,
                members.map((t) => unit(t, String(t.id), paint)),
              ),
            ),
          ],
    );
  }

  /** @param {Token} token @param {string} text @param {Paint} paint */
  function unit(token, text, paint) {
    const node = el("span.tok", { "data-at": token.at, style: { background: paint(token) } }, text);
    nodes.set(token.at, [node]);
    return node;
  }

  /** @param {Token | null} token */
  function inspect(token) {
    if (!token)
      return fill(
        inspector,
        el("p.muted", null, "Point at a token, or press . and , to go through them."),
      );
    const probability = token.logprob === null ? null : Math.exp(token.logprob);
    /** @type {[string, string][]} */
    const shown = [
      ["id", String(token.id)],
      ["position", String(token.at)],
      ["origin", token.span.origin],
      ["log-prob", number(token.logprob)],
      ["probability", probability === null ? "–" : percent(probability)],
      ["entropy", number(token.entropy)],
      ["mismatch", signed(token.mismatch)],
      ["advantage", signed(token.advantage)],
      [
        "weights",
        token.span.weight_version === null ? "–" : `version ${token.span.weight_version}`,
      ],
    ];
    fill(
      inspector,
      el(
        "code.piece",
        null,
        token.piece === null ? "(text not known)" : JSON.stringify(token.piece),
      ),
      el(
        "dl",
        null,
        shown.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
      ),
    );
  }

  const byPlace = (/** @type {EventTarget | null} */ target) => {
    const node = /** @type {HTMLElement} */ (target).closest?.(".tok");
    return node
      ? all.find((t) => t.at === Number(/** @type {HTMLElement} */ (node).dataset.at))
      : undefined;
  };
  strip.addEventListener("mouseover", (event) => {
    const t = byPlace(event.target);
    if (t && pinned < 0) inspect(t);
  });
  strip.addEventListener("click", (event) => {
    const t = byPlace(event.target);
    pin(t && t.at !== pinned ? t.at : -1);
  });

  /** @param {number} at */
  function pin(at) {
    nodes.get(pinned)?.forEach((node) => node.classList.remove("pinned"));
    pinned = at;
    const node = nodes.get(at)?.[0];
    node?.classList.add("pinned");
    node?.closest("details")?.setAttribute("open", "");
    node?.scrollIntoView({ block: "nearest" });
    inspect(all.find((t) => t.at === at) ?? null);
  }

  draw();
  const sampledFrom = () => all.findIndex((t) => t.span.origin === "sampled");
  return {
    node: el("div.tokens", null, tools, el("div.token-pane", null, strip, inspector)),
    move: (by) => {
      const now = all.findIndex((t) => t.at === pinned);
      const next =
        all[now < 0 ? Math.max(0, sampledFrom()) : Math.max(0, Math.min(all.length - 1, now + by))];
      if (next) pin(next.at);
    },
  };
}
