"""The files that the recorded results were measured on: sha256 of the text and of its xz file, by path."""

from __future__ import annotations

from pathlib import Path

from headtohead.common.files import digest_file

RECORDED: dict[str, tuple[str, str]] = {
    "code/test.jsonl.xz": (
        "aacce00d01eeca97494f3600b97a90cf385620e4e760cd75a15dcff670e33267",
        "816b648b66c08d29e6135781694d1c28dc5017e8a6c2da9b992265874e181667",
    ),
    "code/train.jsonl.xz": (
        "788e6737c18e31f5f422e2eace8ca7a18824676f6d31aca2fb45898a3c812be9",
        "8d30db86c2fc0780387e96e8052e367d5574c70da2ea28150656d66798741e5a",
    ),
    "code/valid.jsonl.xz": (
        "89e781942ac89b855922966703a24e453594d1068c2cca10f7714e8e60d8ecc1",
        "6a8a374bc4aa2982115d5c83843cb22911d3b5d0785115426d5012bf32585ff2",
    ),
    "enwik8/enwik8.xz": (
        "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        "9daf1375ee5b674ece456a2f1bb0073e91d2e8f41a66780cdc5f1cae43789608",
    ),
    "glue/CoLA.dev.tsv.xz": (
        "8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd",
        "c93f5ab4ed633959a601b14cb619ff5ac948e7fee76ce22250f402cb7777d872",
    ),
    "glue/CoLA.train.tsv.xz": (
        "cb368ebeb9f27d7ad03720d27ddc95687a311bdb100781a2fe59a5f5b1bc0624",
        "e4669fa66a11f945a7149c4a50de999c59f361d91ce10800fba7cb0fec092e05",
    ),
    "glue/MRPC.dev.tsv.xz": (
        "9e8f284788040f7c9ecde2e1b3c07237c756f926bd9ef8548ef5d34b56f69f17",
        "8b1c5f3e058739a3a88b262e1ec1e434d1c7ec2477939c62b7045aad2448a7b5",
    ),
    "glue/MRPC.train.tsv.xz": (
        "f178bcc72ab4c2c1c778b480912e0c8e1dba3ead150dc1d490d70682ab888c1e",
        "eab0f570a5416eeec372f7de031c7c608a61ae4b0e56bacc684100343dff9c8c",
    ),
    "glue/RTE.dev.tsv.xz": (
        "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb",
        "4110c92ed0ecf56cf33fcb3dd5beecbc77d84dd4c1a77819cefd72fba33948ad",
    ),
    "glue/RTE.train.tsv.xz": (
        "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c",
        "c2167e4ce9f6459a1b106a812807ad4163b34cc37c773533ab0efd3f6e507c70",
    ),
    "glue/SST-2.dev.tsv.xz": (
        "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
        "10259db6f6ebc89c4872544e51d2406e30362b6a231e535f30e801a1ce7ef072",
    ),
    "glue/SST-2.train.tsv.xz": (
        "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        "d9ce70a15cd9544d2a035fa9639d404314f0c7d95fa4a737ae6c2b62162fd402",
    ),
    "hatexplain/hatexplain.jsonl.xz": (
        "773f4dfe17c5a2415abd23039c5d6857435fc730c410206d5a505af1268151b1",
        "a63887bc2cfcb834e842007d2d32170365529712e7263d54e2dbd7782eacc5cc",
    ),
    "pubmed/test.jsonl.xz": (
        "e4ffb4a99799bdecd2d7cf31feac912918c688b2e28fac456687c16ea3922aa2",
        "c9555f4507b07c456e38b69fbb2d712585bca876b56432c7749b9c4d65c1f135",
    ),
    "pubmed/train.jsonl.xz": (
        "ab083ecde17a27b439a0d9ee4fb209854a76ea400225a6d841a21dcb2c4afe81",
        "77b6ae212b1cc77edb6b17629fb379274c40a95a0d346f9a5aecb9356e59e859",
    ),
    "pubmed/valid.jsonl.xz": (
        "d58ebe70feca6ad62243571f02137adeb1d6c8298fc653fe9b733fff39f8d1f3",
        "507026c5613d648ce1a087f8bab30e329791dfa7185036792cb84d5a225c881c",
    ),
    "squad/dev-v1.1.json.xz": (
        "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
        "bcb85e5688156af65c503458ad5f8eb01ad52e7ab56460c1199e92ed00331ac5",
    ),
    "squad/train-subset-v1.1.json.xz": (
        "d505b4993c43788e61df34e22e8b45cb4bae9fd027f2b16c8b7405475580e059",
        "828b4a659da9c9900655847a29307756c8de1de20703bcc3347babe8b1abf6ff",
    ),
    "sva/linzen_gulordava_filtered.tsv.xz": (
        "2adb7dd59840075d27cf15dcfe22c5a7e2fdba80bfb6a6a78959eb3b8cf18651",
        "fc3fceb325b4963d7b11a4986c66cefc8a79adcd7f5fab7bb050aaf71c0595f5",
    ),
    "sva/linzen_numpred.test.1.tsv.xz": (
        "528125391c255b926d6e8c01664188efe5e18a991c1dab88907f796b1198913f",
        "304a74e22697503ebdafb1613966a1ea43e5c1957045a6ade9b37acf23297368",
    ),
    "sva/linzen_numpred.test.2.tsv.xz": (
        "23ad762fbacea0bb35c26dfcdcd72df52a87535cd3fa9dda2bacee44cb8b60c1",
        "98fb1a06536824eb6717760b3bdff4709ca16f495d33247fd5b5578f8a6ecdf9",
    ),
    "sva/linzen_numpred.test.3.tsv.xz": (
        "ce9755d6891b8dcb486a3242f7495fdd3881c93320c2d0d2fda4827a8489de55",
        "94f940710d212a30fc891311d0a36584c862ada4ea2045b44c8080572c68a978",
    ),
    "sva/linzen_numpred.test.4.tsv.xz": (
        "c43e0511bb14904e41b8bfce8a76c84912aa42e61ef5428d7ab4c28197488411",
        "8bf5d25edd926d028afaf1c9c22cdcd546c37d243284be187ee9776a70a36240",
    ),
    "sva/linzen_numpred.test.5.tsv.xz": (
        "f7b9922a0e581c4a9d45612eb249e4d314c7b21d4cf7c33c82c6731d9368d838",
        "897ece4c9e70feeeb943fb864d1e1e745653503300970aba83c33e3cc25858f6",
    ),
    "sva/linzen_numpred.val.tsv.xz": (
        "430643ef15cacdcc2ff88afe44a87b9aeaa094c683653a54c2a936428d300245",
        "51f9095146b9e611bf357ee4c576e68effb0245375ea737538cdfab761b61e03",
    ),
    "sva/linzen_sentences.dev.tsv.xz": (
        "e38b28be5ced0af4aaca9e02aa6543fdac2f3ab40b124805663f4e78a28df0a6",
        "e49c1b1604f44e9839f1bd973b7b4da337271773ec1fa15460f97c5fc4b9972c",
    ),
    "sva/linzen_sentences.test.tsv.xz": (
        "1ff97d6ab9b9612da7ccbf9648553c0eeec2291b9bd7b698f3a85c1412f45abf",
        "0474fea94a534f05c96ad796ce37167ae86b00700ae230544cbae7de6f0f099a",
    ),
    "sva/marvin_linzen.tsv.xz": (
        "e489adab47dfcc122968b5c288bc89fafa84fbb33189605a88e5faffe41e56d9",
        "a6791086e6e4a5a478de7a61e920fd8735da8473fa30a14c6764863c9b122da6",
    ),
    "tinyshakespeare/input.txt.xz": (
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "21b40ccf4999c004256d116655824719001352dbc22636354d9cd0c645d03a4a",
    ),
    "webtext/c4-excerpts.jsonl.xz": (
        "e38705b11c272929849ba4373c464ea7f6962e7fb85d4f90d68bc0ff5e514db9",
        "6e03104473d81b3a18b073c2186b90d75b31e5e229105fc675a1b6fad033bf8e",
    ),
    "webtext/openwebtext.test.jsonl.xz": (
        "ec5c4d6792cf2024a0ea65d1cabf0c71bc681e1c8d5b3a4f84a75a276d2b7a25",
        "c935d2e1e8592bda693b85abb4972da043b75d7301899bf62ccd613ca1716d78",
    ),
    "webtext/openwebtext.train.jsonl.xz": (
        "577178625ee44099b62ccd17031c79a019164e5203a22420f49bb1d0705e10c7",
        "f0df93710785425cc4b6f828924234d264d8d3586f2403ff52bf0eae98f86d45",
    ),
    "webtext/openwebtext.valid.jsonl.xz": (
        "591c8043c1402c3e8d24fada31b939be64bc2718dd49a1d028e68bea0f7e4ef1",
        "33a362b689a03a1c67b7c39da3c831b7ed1f4177a9f529e15e87f674378dd0b8",
    ),
    "wikitext/wikitext103.test.txt.xz": (
        "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        "25bdc2a7e38514f9af643cf848a9c5982056a9af073d7eba957aa80017c22a36",
    ),
    "wikitext/wikitext103.train-head.txt.xz": (
        "611df3b41f14ba024d70702dff829bfaca0f335aa93800ba7785c87a82ff88b5",
        "f0408d3b1bed31ba30783396923878133fad92aabd7f7e8a31889e6d1dbeed5e",
    ),
    "wikitext/wikitext103.valid.txt.xz": (
        "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
        "4e6e7f3093396a4eeae1d3e63f2b0c0ecac2cebf642e29837b0db201d0fe5978",
    ),
    "wikitext/wikitext2.test.txt.xz": (
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        "306c08b989e77ca6d5587c58d90bf8f8fa3be85671b0eda75315de9f68584fbe",
    ),
    "wikitext/wikitext2.train.txt.xz": (
        "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "7f5b03a0219b81adcc680f2d8bd24b7b3f19e4a01ac52f9533ca18cc807ac2bd",
    ),
    "wikitext/wikitext2.valid.txt.xz": (
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "1322771e23310248961e17b3c55df138cd3e5c57f2e36ac1d131e9c6158ccd74",
    ),
    "zeroshot/arc_challenge.jsonl.xz": (
        "1ae3aeedf1951d881cbd5c2e3a31e78a1993d251479afbe4cb413b6707244636",
        "d3909cac9595fc051e2c432324584a8009bda11077ba8fa9b97d4f2313465b09",
    ),
    "zeroshot/arc_easy.jsonl.xz": (
        "d2d12e59543acf9a5ef6079634a72b30215e36c2fd4236fff3bc855d287b87f5",
        "7c345d5855a452f6a7db7bbea3d1079634266999b05b885e8ea2d16c2b17394e",
    ),
    "zeroshot/boolq.jsonl.xz": (
        "454ff101e614370bb1807fe7ebbda6fdb57e794b9662cc1ccae211bf1ff626c8",
        "aecf2e12fd2d942de8b4bed64effd849b905eb4f24102d3a14d1842b210436ea",
    ),
    "zeroshot/copa.jsonl.xz": (
        "595dca44dec54c849490bd403a3e24a29e3b944065783222ebb0eb1a55298846",
        "c30bfe321c22e4c7856daa45aba710046956222ba89b1f7ed756d5d097ff5ab7",
    ),
    "zeroshot/lambada_openai.jsonl.xz": (
        "411bfbe5b9054346b6a19299c0242670adbefb9162efd958593cbc0290b8c9dc",
        "08b1d2a4c9607ed14532e10d073054c62ef5127f2cf52ad99ea1f3a7e14560a2",
    ),
    "zeroshot/piqa.jsonl.xz": (
        "d2870e73aec5154df3faf259b7700876e11608eebdf69e9d6667435673dbe4e0",
        "fb1badf12e2d9e70a6ffad76dd30fc49d5c04c99c8facdaa131a2bfeb8b89345",
    ),
    "zeroshot/simple_arithmetic_withspaces.jsonl.xz": (
        "eb95a1440f1824c36beb3449e74a2a98c5907aa916eefa0170351454f5f6d92b",
        "18b0c0de39d057dbf5959b75793589af9de76c21637d4700d2f6ec42ffe78917",
    ),
    "zeroshot/winogrande.jsonl.xz": (
        "ea1592526f3bfdd0948ed3acb1b4dfa3f83d23698917118688ee1df7f8d4b8d7",
        "9f3257f2b3696f1322e774efbee33662aef7442f8374c4105faf866a8f32ba6b",
    ),
}
_PACKED = {text: (Path(file).name, packed) for file, (text, packed) in RECORDED.items()}


def same_as_recorded(file: str, sha256: str) -> bool | None:
    """Return whether a text is the one measured on, by the path of its file with or without .xz; None if there is none."""
    known = RECORDED.get(file) or RECORDED.get(f"{file}.xz")
    return None if known is None else known[0] == sha256


def identity(path: Path) -> tuple[str, str]:
    """Return the name and sha256 of a file of a named set; of the recorded xz file if it has the same text unpacked.

    A downloaded text is stored unpacked; as the same corpus it has the same fingerprint.
    """
    found = digest_file(path, links=True)
    return _PACKED.get(found, (path.name, found))
