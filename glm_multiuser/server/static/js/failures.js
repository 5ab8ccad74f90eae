/** Failures between the page and the server. */

/** Each has its own text, `failure_…`. */
export const KINDS = [
  "full",
  "busy",
  "unavailable",
  "key",
  "tooLong",
  "refused",
  "broken",
  "lost",
  "unreachable",
  "failed",
];

export class Failure extends Error {
  /**
   * @param kind one of KINDS.
   * @param detail the server's own message, if any.
   * @param retryAfter seconds until a retry, as the server asks for, or null.
   */
  constructor(kind, detail = "", retryAfter = null) {
    super(detail || kind);
    this.kind = kind;
    this.detail = detail;
    this.retryAfter = retryAfter;
  }
}

const KIND_OF_CODE = {
  context_length_exceeded: "tooLong",
  user_busy: "busy",
  key_busy: "busy",
};
// 502: a proxy cannot reach the server.
const KIND_OF_STATUS = { 401: "key", 429: "full", 502: "unreachable", 503: "unavailable" };

/** The failure for a response with an error status. */
export async function failureOf(response) {
  const text = await response.text().catch(() => "");
  const error = errorIn(text);
  const retryAfter = secondsUntil(response.headers.get("Retry-After"));
  const detail = error?.message ?? `HTTP ${response.status}`;
  return new Failure(kindOf(response.status, error), detail, retryAfter);
}

/** The failure for an `{"error": {...}}` event in a stream. */
export function failureInStream(error) {
  return new Failure("broken", typeof error?.message === "string" ? error.message : "");
}

function errorIn(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error?.message === "string" ? error : null;
  } catch {
    // Proxies answer in HTML.
    return null;
  }
}

function kindOf(status, error) {
  return (
    KIND_OF_CODE[error?.code] ?? KIND_OF_STATUS[status] ?? (status < 500 ? "refused" : "failed")
  );
}

function secondsUntil(header) {
  if (header === null) return null;
  const seconds = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
