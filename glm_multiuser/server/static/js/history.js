/** Conversations in the browser's storage, each under its own key: two active tabs overwrite each
 * other only if both use the same conversation. */

import { Conversation } from "./conversation.js";
import { KINDS } from "./failures.js";
import { kept } from "./store.js";

const SAVE_EVERY = 500;
const WHO_ANSWERS = "whoAnswers";
const UNDER_WAY = ["held", "waiting", "streaming", "elsewhere"];
const STATES = ["done", "stopped", "interrupted", "failed", ...UNDER_WAY];
const waiting = new Map();
/** Conversations saved with an unfinished answer. */
const answering = new Set();
let leaving = false;

/** A conversation without messages. */
export function newConversation(number) {
  // crypto.randomUUID() exists only on https and localhost.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return new Conversation({ id, number, name: "", model: "", rounds: [] });
}

/** The conversations of the last visit, in order. */
export function keptConversations() {
  return keptIds().map(keptConversation).filter(Boolean);
}

export function keptIds() {
  const ids = kept.read("conversations");
  if (ids === undefined) return [];
  if (Array.isArray(ids)) return ids.filter((id) => typeof id === "string");
  kept.reject("conversations");
  return [];
}

export function keptConversation(id) {
  const value = kept.read(keyOf(id));
  if (value === undefined) return null;
  const read = readConversation(value, "interrupted");
  if (read === null) {
    kept.reject(keyOf(id));
    return null;
  }
  if (value.rounds.some(({ state }) => UNDER_WAY.includes(state))) askOtherTabs();
  return new Conversation({ id, ...read });
}

/** Another tab may be receiving what looks interrupted here: it then saves it again. */
function askOtherTabs() {
  kept.write(WHO_ANSWERS, true);
  kept.remove(WHO_ANSWERS);
}

kept.watch((name) => {
  if (name === WHO_ANSWERS) answering.forEach(keep);
});

/**
 * Parses a saved conversation; null if it is malformed.
 * @param underWay state for answers that were unfinished when saved.
 */
export function readConversation(value, underWay) {
  const { number, name, model, rounds } = value ?? {};
  const good =
    Number.isInteger(number) &&
    typeof name === "string" &&
    Array.isArray(rounds) &&
    rounds.every(isRound);
  if (!good) return null;
  return { number, name, model: textOf(model), rounds: rounds.map((round) => readRound(round, underWay)) };
}

export function keyOf(id) {
  return `conversation.${id}`;
}

export function keepOrder(conversations) {
  kept.write(
    "conversations",
    conversations.map(({ id }) => id),
  );
}

/** Saves with a delay: an answer changes the conversation at every token. */
export function keepSoon(conversation) {
  if (waiting.has(conversation)) return;
  waiting.set(
    conversation,
    setTimeout(() => keep(conversation), SAVE_EVERY),
  );
}

export function keep(conversation) {
  cancel(conversation);
  if (leaving) return;
  if (conversation.busy) answering.add(conversation);
  else answering.delete(conversation);
  // Other tabs hear only of what is not the same.
  write(conversation, conversation.rounds, conversation.busy ? Date.now() : undefined);
}

function write({ id, number, name, model }, rounds, savedAt) {
  kept.write(keyOf(id), { number, name, model, rounds, savedAt });
}

/** Cancels a pending save, which would restore a conversation that another tab deleted. */
export function stopKeeping(conversation) {
  cancel(conversation);
  answering.delete(conversation);
}

export function forget(conversation) {
  kept.remove(keyOf(conversation.id));
}

/**
 * Flushes pending saves when the page is left, with running answers marked as interrupted. Nothing is
 * saved after that: the browser closes the connections, which must not count as failed answers.
 */
window.addEventListener("pagehide", () => {
  for (const conversation of new Set([...waiting.keys(), ...answering])) {
    cancel(conversation);
    const { rounds } = conversation;
    write(
      conversation,
      rounds.map((round) => readRound(round, "interrupted")),
    );
  }
  leaving = true;
});

/** A page that the browser kept for its Back button has missed what other tabs saved. */
window.addEventListener("pageshow", ({ persisted }) => {
  if (persisted) location.reload();
  else leaving = false;
});

function cancel(conversation) {
  clearTimeout(waiting.get(conversation));
  waiting.delete(conversation);
}

function isRound(round) {
  return (
    typeof round?.question === "string" &&
    typeof round.answer === "string" &&
    STATES.includes(round.state)
  );
}

/** Drops unknown fields and values. */
function readRound(round, underWay) {
  const { question, answer, calls, state, failure, finish, usage, seconds, before } = round;
  const isUnderWay = UNDER_WAY.includes(state);
  if (isUnderWay && underWay === "interrupted" && isRound(before)) return readRound(before, underWay);
  return {
    question,
    answer,
    calls: Array.isArray(calls) ? calls.map(readCall) : [],
    state: isUnderWay ? underWay : state,
    failure: state === "failed" ? readFailure(failure) : null,
    finish: typeof finish === "string" ? finish : null,
    usage: Number.isFinite(usage?.completion_tokens) ? usage : null,
    seconds: Number.isFinite(seconds) ? seconds : null,
    before: null,
  };
}

function readCall(call) {
  return { name: textOf(call?.name), arguments: textOf(call?.arguments) };
}

function textOf(value) {
  return typeof value === "string" ? value : "";
}

function readFailure(failure) {
  const { kind, detail, retryAt } = failure ?? {};
  return {
    kind: KINDS.includes(kind) ? kind : "failed",
    detail: typeof detail === "string" ? detail : "",
    retryAt: Number.isFinite(retryAt) ? retryAt : null,
  };
}
