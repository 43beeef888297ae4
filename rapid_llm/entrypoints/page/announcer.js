/** Tells a screen reader of an answer while it grows: whole sentences, and not more often than one can listen to. */

import { byId } from "./dom.js";

const PAUSE_MS = 3000;
const SENTENCE_ENDS = [". ", "! ", "? ", "\n"];

export class Announcer {
  #pending = "";
  #last = 0;

  /** Say it now. */
  say(text) {
    byId("announcer").textContent = text;
    this.#last = performance.now();
  }

  /** More of the answer. */
  add(text) {
    this.#pending += text;
    const end = 1 + Math.max(...SENTENCE_ENDS.map((mark) => this.#pending.lastIndexOf(mark)));
    if (end && performance.now() - this.#last > PAUSE_MS) {
      this.say(this.#pending.slice(0, end));
      this.#pending = this.#pending.slice(end);
    }
  }

  /** The answer has ended: what was not said yet, and `how`. */
  end(how) {
    this.say(`${this.#pending} ${how}`.trim());
    this.#pending = "";
  }
}
