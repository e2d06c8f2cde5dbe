"""GLOSS's training step in numpy and float64, a score at a time, for tests to compare with."""

from __future__ import annotations

import numpy as np


class Oracle:
    """A model's parameters, and Adam with a state for each row of the latent table."""

    def __init__(self, model, lr=0.0, clip=np.inf):
        self.values = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
        self.radius, self.lr, self.clip = float(model.radius), lr, clip
        self.mean = getattr(model, "position_loss", "sum") == "mean"
        self.states = {}
        self.clipped, self.projected = set(), False

    def step(self, rows, tokens, lengths):
        """One step of training; returns the loss and the norm of the gradients."""
        values = self.values
        loss, gradients = self.loss_and_gradients(values["latents"][rows], tokens, lengths)
        for gradient in gradients.values():
            gradient /= len(rows)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        shrunk = min(self.clip / (norm + 1e-6), 1)
        self.clipped.add(bool(shrunk < 1))
        for name, gradient in gradients.items():
            if name != "latents":
                values[name] -= self._adam(name, gradient * shrunk)
        for row, gradient in zip(rows, gradients["latents"], strict=True):
            moved = values["latents"][row] - self._adam(("latents", row), gradient * shrunk)
            values["latents"][row] = self.ball(moved[None])[0]
            self.projected |= bool(np.linalg.norm(moved) > self.radius)
        return loss / len(rows), norm

    def latent_gradient(self, latents, tokens, lengths):
        return self.loss_and_gradients(latents, tokens, lengths)[1]["latents"]

    def descend(self, latents, tokens, lengths, steps, rate, safeguard=True):
        """Projected gradient descent, sentence by sentence."""
        found = []
        for z, words, n in zip(latents, tokens, lengths, strict=True):
            z, own = z[None], rate
            for _ in range(steps):
                moved = self.ball(z - own * self.latent_gradient(z, words[None], [n]))
                back = (self.latent_gradient(moved, words[None], [n]) * (z - moved)).sum() < 0
                if safeguard and back:
                    own /= 2
                    continue
                z, own = moved, min(own * 1.2, rate)
            found.append(z[0])
        return np.stack(found)

    def ball(self, latents):
        norms = np.sqrt((latents**2).sum(1, keepdims=True))
        return self.radius * latents / np.maximum(norms, self.radius)

    def loss_and_gradients(self, latents, tokens, lengths):
        """Summed over sentences."""
        W, b, p = self.values["weight"], self.values["bias"], self.values.get("positions")
        gradients = {name: np.zeros_like(value) for name, value in self.values.items()}
        gradients["latents"] = np.zeros_like(latents)
        loss = 0.0
        for i, z in enumerate(latents):
            words = tokens[i, : lengths[i]]
            if p is None:
                t = np.isin(np.arange(len(b)), words) & (np.arange(len(b)) != 0)
                o = 1 / (1 + np.exp(-(W @ z + b)))
                loss -= (t * np.log(o) + (1 - t) * np.log(1 - o)).sum()
                cases = [(z, o - t, None)]
            else:
                cases = []
                share = 1 / len(words) if self.mean and len(words) else 1.0
                for place, word in enumerate(words):
                    scores = np.exp(W @ (z + p[place]) + b)
                    o = scores / scores.sum()
                    loss -= share * np.log(o[word])
                    cases.append((z + p[place], share * (o - (np.arange(len(b)) == word)), place))
            for x, d, place in cases:
                gradients["weight"] += np.outer(d, x)
                gradients["bias"] += d
                gradients["latents"][i] += W.T @ d
                if place is not None:
                    gradients["positions"][place] += W.T @ d
        return loss, gradients

    def _adam(self, name, gradient):
        steps, mean, square = self.states.get(name, (0, 0.0, 0.0))
        steps, mean, square = steps + 1, 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        self.states[name] = steps, mean, square
        return self.lr * mean / (1 - 0.9**steps) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-8)
