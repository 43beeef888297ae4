/** The start-up ledger: a bar for each phase, on one clock. */

import { byId, make } from "./dom.js";

let drawn = "";

/** Draw it where it has changed. */
export function showStartup(startup) {
  const text = JSON.stringify(startup.phases) + startup.first_token;
  if (text === drawn) return;
  drawn = text;
  const end = Math.max(startup.first_token ?? 0, ...startup.phases.map((phase) => phase.end));
  byId("phases").replaceChildren(...startup.phases.map((phase) => row(phase, end)));
  byId("startup-notes").replaceChildren(...startup.notes.map((note) => make("li", {}, note)));
  byId("startup-sum").textContent =
    startup.first_token === null
      ? "Seconds since the command was started; the engine's own phases come when it is ready."
      : `First token after ${startup.first_token.toFixed(2)} s, ${Math.floor(100 * startup.accounted)} % of it accounted for. ` +
        "The engine's phases are blue, the server's beside them violet.";
}

function row(phase, end) {
  const bar = make("span");
  bar.style.left = `${(100 * phase.start) / end}%`;
  bar.style.width = `${(100 * (phase.end - phase.start)) / end}%`;
  return make(
    "li",
    { "data-process": phase.thread === "engine" ? "engine" : "server" },
    make("span", { className: "name" }, phase.name),
    make("span", { className: "track", "aria-hidden": "true" }, bar),
    make("span", { className: "seconds" }, `${(phase.end - phase.start).toFixed(2)} s`),
  );
}
