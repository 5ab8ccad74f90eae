/** Input methods (IME) for Chinese, Japanese and Korean. */

/** Whether the key belongs to a composition. Safari reports this only by the key code. */
export function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}
