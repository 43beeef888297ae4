/** The kernel rows that serve, each with the dispatcher's explanation. */

import { byId, make } from "./dom.js";

let drawn = "";

/** Draw them where they have changed: what somebody has opened stays open. */
export function showKernels(kernels) {
  const text = JSON.stringify(kernels);
  if (!kernels.length || text === drawn) return;
  drawn = text;
  byId("kernels").replaceChildren(...kernels.map((kernel) => make("li", {}, explanation(kernel))));
  const rows = new Set(kernels.map((kernel) => kernel.row)).size;
  byId("kernels-sum").textContent = `${rows} rows serve ${kernels.length} questions of the model's layers, in ${kernels[0].dtype}.`;
}

function explanation(kernel) {
  const sizes = Object.entries(kernel.sizes).map(([name, size]) => `${name}=${size}`).join(" ");
  const facts = {
    does: kernel.summary,
    because: kernel.because,
    evidence: kernel.evidence,
    tiles: kernel.tiles,
    "by size": kernel.by_size.map(([most, row]) => `up to ${most.toLocaleString("en")}: ${row}`).join("\n"),
    others: kernel.others.map((other) => `${other.name}: ${other.reasons.join("; ")}`).join("\n"),
  };
  const told = Object.entries(facts).filter(([, text]) => text);
  return make(
    "details",
    {},
    make(
      "summary",
      {},
      make("span", { className: "op" }, kernel.op),
      make("span", { className: "row" }, kernel.row),
      make("span", { className: "sizes muted" }, sizes),
    ),
    make("dl", { className: "facts" }, ...told.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
  );
}
