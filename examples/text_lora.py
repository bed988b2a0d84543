"""Fine-tune a language model on private texts by low-rank updates. Run: python text_lora.py [MODEL]

MODEL is a name on the Hugging Face Hub, such as distilbert-base-uncased, or a folder. Without it,
a tiny model is made here and trained on reviews of films: no network is needed. Then three shops
fine-tune the model together, with all of its weights and with LoRA, which sends far less.
"""

import sys
import tempfile

import numpy as np
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import kedge

rng = np.random.default_rng(0)
transformers.set_seed(0)
transformers.utils.logging.disable_progress_bar()
good, bad = ["good", "great", "lovely", "superb"], ["bad", "awful", "poor", "broken"]
topics = {"films": ["plot", "actor", "music"], "books": ["author", "cover", "chapter"],
          "phones": ["screen", "battery", "camera"], "hotels": ["room", "bed", "pool"]}  # fmt: skip
words = ["[PAD]", "the", "is", "very", "not", *good, *bad, *np.ravel(list(topics.values()))]


def reviews(topic: str, n: int, model: str) -> tuple[np.ndarray, list[str]]:
    """Token ids [n, 8] of reviews such as "the plot is not bad", and what they mean."""
    things, how = rng.choice(topics[topic], n), rng.choice(["very", "not"], n, p=[0.7, 0.3])
    adjectives = rng.choice(good + bad, n)
    texts = [f"the {a} is {b} {c}" for a, b, c in zip(things, how, adjectives, strict=True)]
    happy = np.isin(adjectives, good) == (how == "very")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(texts, padding="max_length", max_length=8, truncation=True)
    return np.array(tokens["input_ids"]), ["happy" if one else "unhappy" for one in happy]


def tiny_model(folder: str) -> str:
    """A BERT of two small layers that has read reviews of films."""
    tokenizer = Tokenizer(models.WordLevel({str(word): i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    fast.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    films = {"films": reviews("films", 400, folder)}
    read = kedge.fit(f"hf:{folder}", films, rounds=10, optimizer="adam", lr=0.003)
    read.models[0].net.save_pretrained(folder)
    return folder


model = sys.argv[1] if len(sys.argv) > 1 else tiny_model(tempfile.mkdtemp())
shops = {topic: reviews(topic, 120, model) for topic in ("books", "phones", "hotels")}
for what, options in {"all weights": "", "low-rank updates": "(lora=4)"}.items():
    run = kedge.fit(f"hf:{model}{options}", shops, rounds=3, optimizer="adam", lr=0.003)
    print(f"{what:17} accuracy {run.last} % with {run.mb_up:.2f} MB sent by the shops")
