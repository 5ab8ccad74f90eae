/** Conversations in the browser's storage, each under a key of its own: two tabs that talk at the
 * same time then overwrite each other's conversations only where both talk in the same one. */

import { Conversation } from "./conversation.js";
import { KINDS } from "./failures.js";
import { kept } from "./store.js";

const SAVE_EVERY = 500;
const UNDER_WAY = ["held", "waiting", "streaming", "elsewhere"];
const STATES = ["done", "stopped", "interrupted", "failed", ...UNDER_WAY];
const waiting = new Map();
/** Conversations that are kept with an answer under way. */
const answering = new Set();
let leaving = false;

/** A conversation without messages. */
export function newConversation(number) {
  // Not crypto.randomUUID(): browsers have it only on https and on localhost.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return new Conversation({ id, number, name: "", model: "", rounds: [] });
}

/** The conversations of the last visit, in their order. */
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
  return new Conversation({ id, ...read });
}

/**
 * What was kept, or null where it makes no sense.
 * @param underWay the state of an answer that was under way then.
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

/** Keeps a conversation soon: an answer changes it at every token. */
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
  write(conversation, conversation.rounds);
}

function write({ id, number, name, model }, rounds) {
  kept.write(keyOf(id), { number, name, model, rounds });
}

/** What still waits to be kept would come back after another tab has forgotten it. */
export function stopKeeping(conversation) {
  cancel(conversation);
  answering.delete(conversation);
}

export function forget(conversation) {
  kept.remove(keyOf(conversation.id));
}

/**
 * Keeps what is waiting to be kept when the page goes away, and that its answers end here. From then
 * on nothing is kept: the browser now cuts the connections, and no answer has failed by that.
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

window.addEventListener("pageshow", () => {
  leaving = false;
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

/** A round without anything that this page does not know. */
function readRound(round, underWay) {
  const { question, answer, calls, state, failure, finish, usage, seconds } = round;
  return {
    question,
    answer,
    calls: Array.isArray(calls) ? calls.map(readCall) : [],
    state: UNDER_WAY.includes(state) ? underWay : state,
    failure: state === "failed" ? readFailure(failure) : null,
    finish: typeof finish === "string" ? finish : null,
    usage: Number.isFinite(usage?.completion_tokens) ? usage : null,
    seconds: Number.isFinite(seconds) ? seconds : null,
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
