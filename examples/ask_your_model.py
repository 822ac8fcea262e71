"""Ask why a model of your own gives this answer and not that one: three lines.

The model is any Transformer in memory, as it is. Here it is the one that comes with the package, a
GPT-2 of two layers, loaded with transformers as you would load yours; it learnt to repeat.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import infoflow_lens
from infoflow_lens import ask

folder = Path(infoflow_lens.__file__).parent / "models" / "shipped" / "stdlib-2l"
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)

# Why "key" behind the second "self.", and not "name"? Because "key" stood behind the first one.
text, other = (f"def {word}(self):\n    self.{word} = self." for word in ("key", "name"))
answer = ask(model, text, "key", "name", other, tokenizer=tokenizer, progress=False)
print(answer.summary())
for sentence, paths in answer.bundles():
    print(f"- {sentence}: cut, {float(answer.path_effect[paths].sum()):+.2f}")
for number in range(3):
    print(answer.look(number))
