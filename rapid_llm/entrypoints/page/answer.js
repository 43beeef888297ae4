/** One answer on the page: it grows once a frame, however fast tokens come. */

import { make } from "./dom.js";

export class Answer {
  #pending = [];
  #frame = 0;

  /** `turns` is the scrolling log that holds it, `name` who answers. */
  constructor(turns, name) {
    this.turns = turns;
    this.said = make("div", { className: "said" });
    this.element = make("article", { className: "turn", "data-by": "model", "aria-busy": "true" }, make("h3", {}, name), this.said);
    turns.append(this.element);
    this.#scroll(true);
  }

  /** What has been shown of it: all of it once it has ended. */
  get text() {
    return this.said.textContent;
  }

  addText(text) {
    this.#add(this.said, text);
  }

  addReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = make("div", { className: "said" });
      const block = make("details", { className: "reasoning" }, make("summary", {}, "Reasoning"), this.reasoning);
      this.said.before(block);
    }
    this.#add(this.reasoning, text);
  }

  /** The server's words, under what was said before. */
  fail(message) {
    this.#under(make("p", { className: "error", role: "alert" }, message));
  }

  /** The answer is complete, or will never be; `counts` is a line on it. */
  end(counts) {
    this.#flush();
    this.element.setAttribute("aria-busy", "false");
    if (counts) this.#under(make("p", { className: "counts muted" }, counts));
  }

  #add(place, text) {
    this.#pending.push([place, text]);
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#changing(() => {
      for (const [place, text] of this.#pending.splice(0)) {
        if (place.firstChild) place.firstChild.appendData(text);
        else place.append(text);
      }
    });
  }

  #under(element) {
    this.#changing(() => this.element.append(element));
  }

  // A reader who has scrolled up is left there.
  #changing(change) {
    const { scrollTop, clientHeight, scrollHeight } = this.turns;
    const isAtEnd = scrollTop + clientHeight > scrollHeight - 40;
    change();
    this.#scroll(isAtEnd);
  }

  #scroll(toEnd) {
    if (toEnd) this.turns.scrollTop = this.turns.scrollHeight;
  }
}
