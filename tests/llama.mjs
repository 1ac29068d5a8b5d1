// What a real llama.cpp makes of a gguf file: token ids of lines, and greedy tokens after prompts. Run in a folder where
// `npm install node-llama-cpp` was done: node llama.mjs MODEL.gguf ASKED.json ANSWER.json
import fs from "node:fs";
import path from "node:path";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const home = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(home.resolve("node-llama-cpp")).href);
const [, , file, asked, answer] = process.argv;
const {lines, prompts, count} = JSON.parse(fs.readFileSync(asked, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath: file});
const tokens = lines.map((line) => Array.from(model.tokenize(line, false)));
const greedy = [];
for (const prompt of prompts) {
    const context = await model.createContext({
        contextSize: 2048, threads: 1, flashAttention: false,
        experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
    });
    const found = [];
    for await (const token of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        found.push(token);
        if (found.length >= count) break;
    }
    greedy.push(found);
    await context.dispose();
}
fs.writeFileSync(answer, JSON.stringify({tokens, greedy}));
process.exit(0);
