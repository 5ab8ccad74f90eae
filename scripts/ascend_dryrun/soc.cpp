// Says which card the graphs are for, which a simulated device leaves empty.
#include <memory>
#include <string>

namespace mindspore {
class MsContext {
 public:
  static std::shared_ptr<MsContext> GetInstance();
  void set_ascend_soc_version(const std::string &name);
};
}  // namespace mindspore

extern "C" void set_soc(const char *name) {
  mindspore::MsContext::GetInstance()->set_ascend_soc_version(name);
}
