"""Token datasets: from files on disk to training samples.

| file | what it is for |
|---|---|
| `indexed_dataset.py` | the `<prefix>.bin` / `<prefix>.idx` pair: reader and builder |
| `index_file.py` | layout of `.idx`, its checks, dtype codes |
| `megatron_dataset.py` | what datasets over a pair share: split, requested size, description |
| `gpt_dataset.py` | fixed-length GPT samples packed from documents; mock data |
| `gpt_index.py` | which tokens make up sample k: document, sample and shuffle index |
| `blended_dataset.py` | several datasets mixed by weight |
| `blended_megatron_dataset_config.py` | settings of all of the above; parsing of the split string |
| `blended_megatron_dataset_builder.py` | config -> train, valid and test datasets, on every rank |
| `index_cache.py` | indices kept on disk, safe when many processes build them at once |
| `megatron_tokenizer.py` | Megatron's import location of the tokenizers' base class |
| `utils.py` | `Split`, `get_blend_from_list`, `DatasetError` |
"""
