// The AI SDK's generateObject, by a JSON schema and by a JSON object, and a forced tool.
// node ai_sdk_client.cjs URL MODEL
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, tool } = require("ai");
const { z } = require("zod");

const Day = z.object({ mood: z.enum(["good", "bad"]), stars: z.number().int().min(1).max(3) });
const Note = z.object({ note: z.string().optional() });
const prompt = "How was it?";

async function main([url, name]) {
  const provider = (supportsStructuredOutputs) =>
    createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, supportsStructuredOutputs })(name);
  const options = { prompt, maxRetries: 0 };
  const day = await generateObject({ model: provider(true), schema: Day, ...options });
  const note = await generateObject({ model: provider(false), schema: Note, ...options });
  const { toolCalls } = await generateText({
    model: provider(true),
    tools: { rate: tool({ description: "Rates a day.", inputSchema: Day }) },
    toolChoice: { type: "tool", toolName: "rate" },
    ...options,
  });
  const called = Day.parse(toolCalls[0].input);
  const kinds = [Day.parse(day.object), Note.parse(note.object), called];
  console.log(JSON.stringify(kinds.map((kind) => ("mood" in kind ? "Day" : "Note"))));
}

main(process.argv.slice(2));
