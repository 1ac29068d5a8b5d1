// Runs a gguf file in a real llama.cpp: token ids of lines, and greedy tokens after prompts. Run in a
// folder in which `npm install node-llama-cpp` was run: node llama.mjs MODEL.gguf REQUEST.json RESPONSE.json
import fs from "node:fs";
import path from "node:path";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);
const [, , file, request, response] = process.argv;
const {lines, prompts, count} = JSON.parse(fs.readFileSync(request, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath: file});
const tokens = lines.map((line) => Array.from(model.tokenize(line, false)));
const greedy = [];
for (const prompt of prompts) {
    const context = await model.createContext({
        contextSize: 2048, threads: 1, flashAttention: false,
        experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
    });
    const generated = [];
    for await (const token of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        generated.push(token);
        if (generated.length >= count) break;
    }
    greedy.push(generated);
    await context.dispose();
}
fs.writeFileSync(response, JSON.stringify({tokens, greedy}));
process.exit(0);
