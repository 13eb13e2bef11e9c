"""transformers.Trainer on a GPT-2 built from a configuration: 20 steps, clipping, a linear
schedule.
"""

import argparse
import tempfile

import torch
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=1)
    args = parser.parse_args()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=128,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.cumsum(torch.randint(0, 5, (768, 32)), 1) % 128
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=1e-3,
            logging_steps=5,
            report_to=[],
            use_cpu=True,
            save_strategy="epoch",
            disable_tqdm=True,
        )
        trainer = InOrder(
            model=model, args=arguments, train_dataset=rows[:640], eval_dataset=rows[640:]
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    print(f"final loss {loss:.10f}")


if __name__ == "__main__":
    main()
