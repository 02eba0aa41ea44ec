"""A training loop that knows nothing of profiling, as the pages' commands run it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
dataset = TensorDataset(torch.randn(640, 64), torch.randint(10, (640,)))


def load_batch(loader):
    return next(loader)


loader = iter(DataLoader(dataset, batch_size=16))
for _ in range(30):
    inputs, targets = load_batch(loader)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
