import json
import os
from pathlib import Path

import lm_eval
from common import MODE, MODEL, TEXT, URL, say

# Its own way to read data sets, offline.
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
file = Path(os.environ["HOME"]) / "questions.jsonl"
answer = "Rome is the capital of Italy."
rows = [{"question": TEXT, "choices": choices} for choices in ([answer, "Yes"], ["No", answer])]
file.write_text("\n".join(map(json.dumps, rows)))
task = {
    "task": MODE,
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(file)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
if MODE == "chat":
    task |= {"output_type": "generate_until", "doc_to_target": answer}
    task |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64, "temperature": 0}}
    task |= {"metric_list": [{"metric": "exact_match"}]}
    kind, path = "local-chat-completions", "v1/chat/completions"
else:
    task |= {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0}
    task |= {"metric_list": [{"metric": "acc"}]}
    kind, path = "local-completions", "v1/completions"
found = lm_eval.simple_evaluate(
    kind,
    {"model": MODEL, "base_url": f"{URL}/{path}", "tokenizer": os.environ["TOKENIZER"]},
    [task],
    apply_chat_template=MODE == "chat",
    log_samples=True,
)
print(json.dumps(found["results"]))
scores = []
for sample in found["samples"][MODE]:
    if MODE == "chat":
        say(sample["filtered_resps"][0])
    else:
        scores.append([float(value) for value, _ in sample["filtered_resps"]])
if scores:
    # The same text is as likely in both places, and less likely than a shorter one.
    (first, short), (other, last) = scores
    assert abs(first - last) < 1e-3 > first, scores
    assert first < min(short, other), scores
