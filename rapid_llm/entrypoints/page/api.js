/** Calls of this server, each with the key where one was given. Paths are relative: a proxy may put a folder before them. */

const KEY = "rapid_llm.key"; // in sessionStorage: it is gone with the tab, and no other site reads it

/** An answer that is an error: its status, and the server's own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** The answer to a call; throws a Refusal where it is an error, and a TypeError where there is none. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (!response.ok) throw new Refusal(response.status, await wordsOf(response));
  return response;
}

async function wordsOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}: ${text.slice(0, 500)}`; // a proxy's own page, say
  }
}
