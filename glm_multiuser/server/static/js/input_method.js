/** Input methods, with which Chinese, Japanese and Korean are typed. */

/** Whether this key chooses a word in one. Safari says so only by the key code. */
export function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}
