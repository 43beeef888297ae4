/** What the engine does now, drawn from two views of its counts. */

import { byId } from "./dom.js";

const POINTS = 60;
const rates = [];
let before = null;

/** Draw a view; without a load all numbers are unknown. */
export function showLoad(view) {
  const { load, limits, seconds, restarts } = view;
  const since = load && before && load.steps >= before.load.steps ? before : null; // an engine that was started again counts anew
  before = load && { load, seconds };
  const per = (name) => (since ? (load[name] - since.load[name]) / (seconds - since.seconds) : 0);
  showHistory(per("generated_tokens"));
  write({
    rate: load && count(per("generated_tokens"), 1),
    "prompt-rate": load && `${count(Math.max(0, per("admitted_tokens") - per("cached_tokens")))} prompt tokens/s`,
    running: load && count(load.running),
    "most-running": load && `of ${count(limits.max_num_seqs)}`,
    waiting: load && count(load.waiting),
    step: load && stepTime(load, since?.load),
    kv: load && percent(load.kv_pages_used, load.kv_pages),
    "kv-tokens": load && `of ${count(limits.kv_tokens)}`,
    hits: load && percent(load.cached_tokens, load.admitted_tokens),
    "hit-tokens": load && `${count(load.cached_tokens)} tokens`,
    preemptions: load && count(load.preemptions),
  });
  byId("kv-meter").value = load ? load.kv_pages_used / load.kv_pages : 0;
  byId("load-notes").textContent = load
    ? `${count(load.steps)} steps, context of ${count(limits.max_model_len)} tokens, ` +
      `${count(load.compiles_after_ready)} compiles after ready, ${count(restarts)} restarts.`
    : "";
}

function write(values) {
  for (const element of byId("load").querySelectorAll("[data-value]")) {
    element.textContent = values[element.dataset.value] ?? (element.tagName === "SMALL" ? "" : "–");
  }
}

function showHistory(rate) {
  rates.push(rate);
  if (rates.length > POINTS) rates.shift();
  const most = Math.max(...rates, 1e-9);
  const points = rates.map((each, i) => `${POINTS - rates.length + i},${0.97 - (0.94 * each) / most}`);
  byId("history").firstElementChild.setAttribute("points", points.join(" "));
}

/** The mean of the steps between two views, else that of the newest step. */
function stepTime(load, since) {
  const steps = since ? load.steps - since.steps : 0;
  const mean = steps ? (load.total_step_seconds - since.total_step_seconds) / steps : load.step_seconds;
  return `${(1000 * mean).toFixed(mean < 0.01 ? 2 : 1)} ms`;
}

const count = (number, digits = 0) => number.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "0 %");
