/** The conversation: what was said, the answer that grows, and how it ends. */

import { Announcer } from "./announcer.js";
import { Answer } from "./answer.js";
import { call, Refusal } from "./api.js";
import { byId, make } from "./dom.js";
import { samplingValues, systemMessages } from "./sampling.js";
import { events } from "./stream.js";

export class Chat {
  #messages = [];
  #open = null; // the AbortController of the answer that grows
  #announcer = new Announcer();
  #isReady = false;
  model = "model";

  constructor() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
  }

  /** Whether the engine serves: until it does, nothing is sent. */
  set isReady(isReady) {
    this.#isReady = isReady;
    this.#showButtons();
  }

  /** Close the connection, by which the server ends the request before its next step. */
  stop() {
    this.#open?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    byId("turns").replaceChildren(byId("hint"));
    byId("hint").hidden = false;
    byId("prompt").focus();
  }

  async #send() {
    const content = byId("prompt").value;
    if (!content.trim() || !this.#isReady || this.#open) return;
    byId("prompt").value = "";
    byId("hint").hidden = true;
    const asked = make("article", { className: "turn", "data-by": "user" }, make("h3", {}, "You"));
    asked.append(make("div", { className: "said" }, content));
    byId("turns").append(asked);
    await this.#answer({ role: "user", content });
  }

  async #answer(question) {
    const messages = this.#messages;
    const answer = new Answer(byId("turns"), this.model);
    this.#open = new AbortController();
    this.#showButtons();
    this.#announcer.say("The model answers.");
    const clock = { sent: performance.now() };
    try {
      for await (const event of await this.#ask([...messages, question])) this.#take(event, answer, clock);
      answer.end(countsOf(clock));
      this.#announcer.end("The answer is complete.");
    } catch (error) {
      this.#break(error, answer);
    } finally {
      this.#open.abort(); // of a stream that failed, what is left of it
      this.#open = null;
      this.#showButtons();
    }
    // What was answered, or begun, is a part of the conversation; a question that was refused is not.
    if (answer.text) messages.push(question, { role: "assistant", content: answer.text });
    else if (messages === this.#messages && !byId("prompt").value) byId("prompt").value = question.content;
  }

  async #ask(messages) {
    const body = {
      messages: [...systemMessages(), ...messages],
      ...samplingValues(),
      stream: true,
      stream_options: { include_usage: true },
    };
    return events(await call("v1/chat/completions", { body, signal: this.#open.signal }));
  }

  #take(event, answer, clock) {
    if (event.error) throw new Refusal(0, event.error.message);
    if (event.usage) clock.usage = event.usage;
    for (const { delta, finish_reason: reason } of event.choices) {
      if (reason) clock.reason = reason;
      if (!delta.content && !delta.reasoning_content) continue;
      clock.last = performance.now();
      clock.first ??= clock.last;
      if (delta.reasoning_content) answer.addReasoning(delta.reasoning_content);
      if (delta.content) {
        answer.addText(delta.content);
        this.#announcer.add(delta.content);
      }
    }
  }

  #break(error, answer) {
    if (error.name === "AbortError") {
      answer.end("stopped");
      this.#announcer.end("The answer was stopped.");
      return;
    }
    answer.end();
    if (error instanceof Refusal) answer.fail(error.message);
    else if (error instanceof TypeError) answer.fail(`The connection has broken off: ${error.message}.`);
    else {
      answer.fail(`This page has failed: ${error.message}`);
      throw error; // its trace belongs into the console
    }
  }

  #showButtons() {
    byId("send").disabled = !this.#isReady || this.#open !== null;
    byId("stop").hidden = this.#open === null;
  }
}

/** A line on an answer: its tokens as the server counted them, its times as they were here. */
function countsOf({ usage, reason, sent, first, last }) {
  if (!usage) return "";
  const cached = usage.prompt_tokens_details.cached_tokens;
  const parts = [
    `${usage.prompt_tokens} tokens in${cached ? ` (${cached} from the prefix cache)` : ""}`,
    `${usage.completion_tokens} out`,
  ];
  // The first token's time is the prompt's, so it counts in neither.
  if (last > first) parts.push(`${((1000 * (usage.completion_tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - sent) / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut off at max tokens");
  return parts.join(" · ");
}
