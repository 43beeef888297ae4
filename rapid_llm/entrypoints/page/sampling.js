/** The fields of sampling, as a request says them. What is out of range the server refuses, in its own words. */

import { byId } from "./dom.js";

/** Values by their names in a request; an empty field is left out. */
export function samplingValues() {
  const values = {};
  for (const [name, text] of fields()) {
    if (name === "system" || !text.trim()) continue;
    values[name] = name === "stop" ? text.split("\n").filter((line) => line) : numberOf(text.trim());
  }
  return values;
}

/** The system prompt as messages: one, or none. */
export function systemMessages() {
  const content = new Map(fields()).get("system");
  return content.trim() ? [{ role: "system", content }] : [];
}

const fields = () => new FormData(byId("sampling")).entries();

// What is no number, or an integer that would be rounded, goes as it was written: then the server says so.
function numberOf(text) {
  const number = Number(text);
  const isExact = Number.isFinite(number) && (Number.isSafeInteger(number) || !Number.isInteger(number));
  return isExact ? number : text;
}
