/** Server-sent events, as they come: in pieces that end anywhere, within a line or within a character. */

/** Cuts text into the data of events. */
export class EventReader {
  #rest = "";
  #data = [];

  /** The data of each event that `text` completes. */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines.map((line) => line.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) this.#data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && this.#data.length) events.push(this.#data.splice(0).join("\n"));
    }
    return events;
  }
}

/** The JSON of each event of a response's stream; throws a TypeError where it ends without [DONE]. */
export async function* events(response) {
  const reader = new EventReader();
  const decoder = new TextDecoder();
  let isWhole = false;
  for await (const bytes of pieces(response.body)) {
    for (const data of reader.feed(decoder.decode(bytes, { stream: true }))) {
      if (data === "[DONE]") isWhole = true;
      else yield JSON.parse(data);
    }
  }
  if (!isWhole) throw new TypeError("the stream ended before the answer did");
}

// A ReadableStream is not iterable in every browser yet.
async function* pieces(body) {
  const reader = body.getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) yield piece.value;
}
