/** The page: the chat, and the engine as GET /engine tells of it. It calls the server that it came from and nobody else. */

import { hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { follow } from "./follow.js";
import { showKernels } from "./kernels.js";
import { showLoad } from "./load.js";
import { showStartup } from "./startup.js";

const chat = new Chat();

function showView(view) {
  const { status } = view.readiness;
  byId("model").textContent = chat.model = view.model;
  document.title = `${view.model} · rapid_llm`;
  byId("key-form").hidden = true;
  chat.isReady = status === "ready";
  showState(status, status === "ready" ? "" : progressText(view.readiness), view.readiness);
  showLoad(view);
  if (view.startup) showStartup(view.startup);
  showKernels(view.kernels);
}

function progressText({ status, phase, done, total }) {
  const what = status === "restarting" ? "The engine has ended and is started again" : "The engine starts";
  const bytes = total ? `, ${(done / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB` : "";
  return `${what}: ${phase || "process"}${bytes}. Messages can be sent as soon as it is ready.`;
}

/** The word at the top, and a notice where `text` says more; without bytes its bar only shows that something goes on. */
function showState(state, text, { done = 0, total = 0 } = {}) {
  // Written only where it changes: a screen reader says it each time.
  if (byId("state").textContent !== state) byId("state").textContent = state;
  byId("state").dataset.state = state;
  byId("notice").hidden = !text;
  byId("notice-text").textContent = text;
  if (total) byId("notice-progress").value = done / total;
  else byId("notice-progress").removeAttribute("value");
}

function askForKey(words) {
  showState("locked", "");
  byId("key-form").hidden = false;
  if (hasKey()) byId("key-why").textContent = words;
  byId("key").focus();
}

function showLost() {
  chat.isReady = false;
  showState("lost", "The server does not answer. It is asked again every second.");
}

const askNow = follow({ onView: showView, onKey: askForKey, onLost: showLost });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  askNow();
});
