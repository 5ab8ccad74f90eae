// The official client for Node: a tool by its own runner, and a second turn as a stream.
// node openai_client.cjs URL MODEL QUESTION SECOND_QUESTION
const { OpenAI } = require("openai");

const TOOL = {
  type: "function",
  function: {
    name: "get_time",
    description: "The time of day in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } } },
    parse: JSON.parse,
    function: () => "08:30",
  },
};

async function main([url, model, question, secondQuestion]) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const messages = [
    { role: "developer", content: "Be brief." },
    { role: "user", content: question },
  ];
  const runner = client.chat.completions.runTools({ model, messages, tools: [TOOL] });
  const answer = await runner.finalContent();
  messages.push(...runner.messages.slice(2), { role: "user", content: secondQuestion });
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  let second = "";
  for await (const chunk of stream) second += chunk.choices[0]?.delta?.content ?? "";
  console.log(JSON.stringify([answer, second]));
}

main(process.argv.slice(2));
