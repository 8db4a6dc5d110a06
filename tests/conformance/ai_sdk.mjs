// Vercel's AI SDK over Messages: a tool loop, streamed or whole. It refuses thinking without a signature.
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [, , url, mode] = process.argv;
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "k" });
const setLamp = tool({
  description: "Set the lamp of a room.",
  inputSchema: z.object({ room: z.string(), level: z.number() }),
  execute: async () => "Done. Now the next room.",
});
const options = {
  model: anthropic("kimi-k3"),
  maxOutputTokens: 1000,
  system: "You run a house.",
  prompt: "Turn on the lamp in the hall.",
  tools: { set_lamp: setLamp },
  stopWhen: stepCountIs(4),
};
if (mode === "stream") {
  const result = streamText(options);
  for await (const text of result.textStream) process.stdout.write(text);
} else {
  process.stdout.write((await generateText(options)).text);
}
