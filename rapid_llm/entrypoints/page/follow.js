/** Asks for the engine's view once a second, as long as the page can be seen. */

import { call, Refusal } from "./api.js";

const EVERY_MS = 1000;

/**
 * Follow the engine.
 *
 * `onView` is given each view, `onKey` the server's words where it asks for a key, `onLost` nothing where it does not answer.
 * Returns what asks at once: after a key was refused nothing is asked until then.
 */
export function follow({ onView, onKey, onLost }) {
  let timer = 0;
  let isAsking = false;

  async function ask() {
    clearTimeout(timer);
    if (isAsking || document.hidden) return;
    isAsking = true;
    try {
      onView(await (await call("engine")).json());
    } catch (error) {
      if (error.status === 401) return onKey(error.message);
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      onLost();
    } finally {
      isAsking = false;
    }
    timer = setTimeout(ask, EVERY_MS);
  }

  document.addEventListener("visibilitychange", ask);
  ask();
  return ask;
}
