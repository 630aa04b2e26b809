// Vercel's AI SDK over chat, responses and messages: a tool loop, whole and streamed, and an object of a schema.
import assert from 'node:assert';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, isStepCount, Output, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, model, toyUrl, toyModel] = process.argv.slice(2);

function apis(url, model) {
  const baseURL = `${url}/v1`;
  const compatible = createOpenAICompatible({
    name: 'quintet', baseURL, apiKey: 'unused', includeUsage: true, supportsStructuredOutputs: true,
  });
  const openai = createOpenAI({ baseURL, apiKey: 'unused' });
  const anthropic = createAnthropic({ baseURL, apiKey: 'unused' });
  return {
    compatible: compatible(model),
    chat: openai.chat(model),
    responses: openai.responses(model),
    messages: anthropic(model),
  };
}

const cities = [];
const tools = {
  weather: tool({
    description: 'Tell the weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { cities.push(city); return `Fine in ${city}`; },
  }),
};
const system = `Help with plans for a trip. ${'Be short. '.repeat(200)}`;

for (const [name, engine] of Object.entries(apis(url, model))) {
  const options = { model: engine, system, prompt: 'Weather in Oslo?', tools, stopWhen: isStepCount(4), maxOutputTokens: 300 };
  const whole = await generateText(options);
  assert.deepStrictEqual(cities.splice(0), ['Oslo'], name);
  assert.strictEqual(whole.text, 'It is fine in Oslo.', name);
  assert.strictEqual(whole.steps.length, 2, name);
  assert.strictEqual(whole.steps[0].finishReason, 'tool-calls', name);
  assert.strictEqual(whole.finishReason, 'stop', name);
  const reasons = ['compatible', 'messages'].includes(name); // OpenAI's provider reads only summaries
  if (reasons) assert.match(whole.steps[0].reasoningText ?? '', /look/, name);
  const [first, second] = whole.steps.map(step => step.usage);
  const cached = second.inputTokenDetails.cacheReadTokens;
  console.log(name, first.inputTokens, second.inputTokens, cached);
  assert(cached >= 0.95 * first.inputTokens, `${name}: ${cached} of ${first.inputTokens} tokens`);

  const streamed = streamText(options);
  const kinds = new Set();
  for await (const part of streamed.fullStream) {
    assert.notStrictEqual(part.type, 'error', `${name}: ${part.error}`);
    kinds.add(part.type);
  }
  for (const kind of [...(reasons ? ['reasoning-delta'] : []), 'tool-input-delta', 'tool-call', 'tool-result', 'text-delta', 'finish']) {
    assert(kinds.has(kind), `${name}: ${kind} is not in ${[...kinds]}`);
  }
  assert.deepStrictEqual(cities.splice(0), ['Oslo'], name);
  assert.strictEqual(await streamed.text, 'It is fine in Oslo.', name);
}

const shape = z.object({ city: z.enum(['Oslo', 'Rome']), days: z.union([z.literal(1), z.literal(3)]) });
for (const [name, engine] of Object.entries(apis(toyUrl, toyModel))) {
  const { output } = await generateText({
    model: engine, prompt: 'A place as JSON, please.', output: Output.object({ schema: shape }), maxOutputTokens: 100,
  });
  assert(shape.safeParse(output).success, `${name}: ${JSON.stringify(output)}`);
}
